// An object as Apple's compiler makes one, with Apple's headers: it knows nothing of this machine. Each check returns 1
// where the functions that its line in test_devices_ios_abi.py names do what they do there.
#include <fcntl.h>
#include <ftw.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cctype>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <istream>
#include <locale>
#include <mutex>
#include <regex>
#include <sstream>
#include <stdexcept>
#include <streambuf>
#include <string>
#include <thread>

#define CHECK(name) extern "C" int check_##name()

namespace {
int destroyed;
struct Counted {
  ~Counted() { ++destroyed; }
};

[[gnu::noinline]] void throw_deep(int depth, const std::string& text) {
  const Counted counted;
  if (depth == 0) throw std::runtime_error(text);
  throw_deep(depth - 1, text + ".");
}
}  // namespace

CHECK(exceptions) {
  try {
    throw_deep(5, "deep");
  } catch (const std::exception& error) {
    return std::string(error.what()) == "deep....." && destroyed == 6;
  }
  return 0;
}

namespace {
thread_local int counter;
thread_local Counted at_end;
}  // namespace

CHECK(thread_variables) {
  counter = 5;
  int seen = -1;
  std::thread other([&] {
    (void)&at_end;
    seen = counter;
    counter = 7;
  });
  other.join();
  return seen == 0 && counter == 5 && destroyed == 1;
}

namespace {
std::mutex shared_mutex;
long total;
}  // namespace

CHECK(mutex) {
  const auto add = [] {
    for (int index = 0; index < 20000; ++index) {
      const std::lock_guard<std::mutex> lock(shared_mutex);
      total = total + 1;
    }
  };
  std::thread one(add), two(add);
  one.join();
  two.join();
  shared_mutex.lock();
  const bool held = !shared_mutex.try_lock();
  shared_mutex.unlock();
  return total == 40000 && held;
}

namespace {
pthread_mutex_t plain_mutex = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t plain_condition = PTHREAD_COND_INITIALIZER;
int stage;

void* signal_stage(void*) {
  pthread_mutex_lock(&plain_mutex);
  stage = 1;
  pthread_cond_signal(&plain_condition);
  pthread_mutex_unlock(&plain_mutex);
  return nullptr;
}
}  // namespace

CHECK(plain_condition) {
  pthread_t thread;
  pthread_mutex_lock(&plain_mutex);
  pthread_create(&thread, nullptr, signal_stage, nullptr);
  while (stage == 0) pthread_cond_wait(&plain_condition, &plain_mutex);
  const timespec moment = {0, 1000000};
  const int late = pthread_cond_timedwait_relative_np(&plain_condition, &plain_mutex, &moment);
  pthread_mutex_unlock(&plain_mutex);
  pthread_join(thread, nullptr);
  return late == 60;
}

CHECK(condition_variable) {
  std::mutex mutex;
  std::condition_variable condition;
  bool ready = false;
  std::unique_lock<std::mutex> lock(mutex);  // taken first, so that the other thread has to be waited for
  std::thread other([&] {
    const std::lock_guard<std::mutex> inner(mutex);
    ready = true;
    condition.notify_all();
  });
  condition.wait(lock, [&] { return ready; });
  const bool late = condition.wait_for(lock, std::chrono::milliseconds(2)) == std::cv_status::timeout;
  lock.unlock();
  other.join();
  return late;
}

CHECK(recursive_mutex) {
  pthread_mutexattr_t attributes;
  pthread_mutex_t mutex;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_RECURSIVE);
  pthread_mutex_init(&mutex, &attributes);
  pthread_mutexattr_destroy(&attributes);
  const bool twice = pthread_mutex_lock(&mutex) == 0 && pthread_mutex_trylock(&mutex) == 0;
  pthread_mutex_unlock(&mutex);
  pthread_mutex_unlock(&mutex);
  return twice && pthread_mutex_destroy(&mutex) == 0;
}

namespace {
int runs;
pthread_once_t once = PTHREAD_ONCE_INIT;
void run_once() { ++runs; }
}  // namespace

CHECK(once) { return pthread_once(&once, run_once) == 0 && pthread_once(&once, run_once) == 0 && runs == 1; }

CHECK(thread_key) {
  struct {
    pthread_key_t key;
  } made;
  memset(&made, 0xa5, sizeof made);
  pthread_key_create(&made.key, nullptr);
  return made.key < 4096 && pthread_setspecific(made.key, &made) == 0 && pthread_getspecific(made.key) == &made;
}

CHECK(files) {
  const int file = open("made", O_CREAT | O_TRUNC | O_RDWR | O_CLOEXEC, 0600);
  struct stat facts;
  memset(&facts, 0xa5, sizeof facts);
  const bool written = file >= 0 && write(file, "12345", 5) == 5 && fstat(file, &facts) == 0 && facts.st_size == 5;
  void* mapped = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
  close(file);
  return written && S_ISREG(facts.st_mode) && facts.st_nlink == 1 && stat("made", &facts) == 0 &&
         facts.st_mtimespec.tv_sec > 1500000000 && facts.st_blksize == 4096 && mapped != MAP_FAILED &&
         open("none", O_RDONLY) == -1 && errno == ENOENT && sysconf(_SC_PAGESIZE) == 4096;
}

namespace {
int kinds[8];
int visit(const char*, const struct stat* facts, int kind, struct FTW*) {
  if (kind >= 0 && kind < 8) kinds[kind] += kind == FTW_DP ? S_ISDIR(facts->st_mode) : S_ISREG(facts->st_mode);
  return 0;
}
}  // namespace

CHECK(folders) {
  mkdir("folder", 0700);
  close(open("folder/file", O_CREAT | O_WRONLY, 0600));
  return nftw("folder", visit, 8, FTW_DEPTH | FTW_PHYS) == 0 && kinds[FTW_F] == 1 && kinds[FTW_DP] == 1;
}

CHECK(clocks) {
  timespec time;
  return clock_gettime(CLOCK_MONOTONIC, &time) == 0 && clock_gettime(CLOCK_MONOTONIC_RAW, &time) == 0 &&
         clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time) == 0 && time.tv_sec < 100 &&
         clock_gettime_nsec_np(CLOCK_UPTIME_RAW) > 0;
}

CHECK(letters) {
  volatile int letter = 'x', digit = '7', space = ' ';
  return isalpha(letter) && !isalpha(digit) && isdigit(digit) && isxdigit(digit) && isspace(space) &&
         toupper(letter) == 'X' && tolower('Q') == 'q';
}

CHECK(facet) {
  const auto& kinds_of = std::use_facet<std::ctype<char>>(std::locale::classic());
  volatile char letter = 'x', digit = '7';
  return kinds_of.is(std::ctype_base::alpha, letter) && !kinds_of.is(std::ctype_base::digit, letter) &&
         kinds_of.is(std::ctype_base::digit, digit) && kinds_of.is(std::ctype_base::space, ' ');
}

CHECK(regex) {
  const std::string text = "a1 _b!";
  return std::regex_replace(text, std::regex("[^a-zA-Z0-9]"), "-") == "a1--b-" &&
         std::regex_replace(text, std::regex("\\w"), "w") == "ww ww!" &&
         std::regex_replace(text, std::regex("[[:space:][:punct:]]"), "s") == "a1ssbs" &&
         std::regex_match("123", std::regex("\\d+")) && !std::regex_match("12a", std::regex("\\d+"));
}

// As a function of the library, which headers of another release have inline.
std::istream* seek(std::istream*, long long, std::ios_base::seekdir) __asm__(
    "__ZNSt3__113basic_istreamIcNS_11char_traitsIcEEE5seekgExNS_8ios_base7seekdirE");

CHECK(positions) {
  std::istringstream stream("0123456789");
  seek(&stream, 4, std::ios::beg);
  const int letter = stream.get();
  const auto at = static_cast<long>(stream.tellg());
  seek(&stream, 0, std::ios::end);
  const auto end = static_cast<long>(stream.tellg());
  seek(&stream, -1, std::ios::beg);
  return letter == '4' && at == 5 && end == 10 && stream.fail();
}

namespace {
struct Bare : std::streambuf {};
}  // namespace

CHECK(bare_buffer) {
  Bare buffer;
  std::streambuf* volatile seen = &buffer;
  return static_cast<long>(seen->pubseekoff(0, std::ios::cur)) == -1 &&
         static_cast<long>(seen->pubseekpos(std::streampos(3))) == -1;
}

CHECK(sines) {
  volatile double angle = 0.5;
  volatile float single = 0.5F;
  const double value = angle, sine = std::sin(value), cosine = std::cos(value);
  const float half = single, short_sine = std::sin(half), short_cosine = std::cos(half);
  return std::abs(sine - 0.479425538604203) < 1e-12 && std::abs(cosine - 0.877582561890373) < 1e-12 &&
         std::abs(short_sine - 0.47942555F) < 1e-6F && std::abs(short_cosine - 0.87758255F) < 1e-6F;
}

extern "C" void memset_pattern16(void*, const void*, size_t);

CHECK(patterns) {
  char out[24];
  memset_pattern16(out, "0123456789abcdef", 20);
  return memcmp(out, "0123456789abcdef0123", 20) == 0;
}
