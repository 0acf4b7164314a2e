/* Functions of Android's C library that differ from this program's: other numbers, sizes or promises under one name.
 *
 * What is not here is the same on both: on 64-bit Linux the kernel decides most of it. `bionic_NAME` stands for NAME.
 * Numbers are those of Android's headers (bionic/libc/include). */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <libgen.h>
#include <limits.h>
#include <linux/futex.h>
#include <locale.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int *bionic___errno(void) { return &errno; }

/* bits/sysconf.h */
long bionic_sysconf(int name) {
  switch (name) {
    case 0x06: return sysconf(_SC_CLK_TCK);
    case 0x0b: return sysconf(_SC_OPEN_MAX);
    case 0x27:
    case 0x28: return sysconf(_SC_PAGESIZE);
    case 0x60: return sysconf(_SC_NPROCESSORS_CONF);
    case 0x61: return sysconf(_SC_NPROCESSORS_ONLN);
    case 0x62: return sysconf(_SC_PHYS_PAGES);
    case 0x63: return sysconf(_SC_AVPHYS_PAGES);
    default: errno = EINVAL; return -1;
  }
}

/* unistd.h */
long bionic_pathconf(const char *path, int name) {
  switch (name) {
    case 0: return pathconf(path, _PC_FILESIZEBITS);
    case 1: return pathconf(path, _PC_LINK_MAX);
    case 4: return pathconf(path, _PC_NAME_MAX);
    case 5: return pathconf(path, _PC_PATH_MAX);
    default: errno = EINVAL; return -1;
  }
}

/* The release of Android, which NNAPI's provider asks for; nothing else is known of the phone. */
int bionic___system_property_get(const char *name, char *value) {
  const char *level = getenv("EDGEKIT_ANDROID_API");
  strcpy(value, strcmp(name, "ro.build.version.sdk") == 0 ? (level != NULL ? level : "34") : "");
  return (int)strlen(value);
}

/* A set of signals has 8 bytes there and 128 here. */
int bionic_sigfillset(uint64_t *set) {
  *set = ~UINT64_C(0);
  return 0;
}

int bionic_pthread_sigmask(int how, const uint64_t *set, uint64_t *before) {
  sigset_t mine, old;
  sigemptyset(&mine);
  if (set != NULL) memcpy(&mine, set, sizeof *set);
  const int result = pthread_sigmask(how, set != NULL ? &mine : NULL, &old);
  if (before != NULL) memcpy(before, &old, sizeof *before);
  return result;
}

/* A mutex has 40 bytes there, 48 in glibc for Arm, whose functions would clear what lies behind it. */
int bionic_pthread_mutex_init(void *mutex, const pthread_mutexattr_t *attributes) {
  pthread_mutex_t made;
  const int result = pthread_mutex_init(&made, attributes);
  memcpy(mutex, &made, 40);
  return result;
}

/* A condition is aligned to 4 bytes there and to 8 in glibc, whose 64-bit atomics on it end an Arm program. So it is
 * what it is there: a number that changes with each signal, and the kernel's queue of those who wait for that. */
struct condition {
  uint32_t signals;
};

static int wait_condition(struct condition *condition, pthread_mutex_t *mutex, clockid_t clock,
                          const struct timespec *until) {
  const uint32_t seen = __atomic_load_n(&condition->signals, __ATOMIC_ACQUIRE);
  pthread_mutex_unlock(mutex);
  const int real = clock == CLOCK_REALTIME ? FUTEX_CLOCK_REALTIME : 0;
  const long result = syscall(SYS_futex, &condition->signals, FUTEX_WAIT_BITSET_PRIVATE | real, seen, until, NULL,
                              FUTEX_BITSET_MATCH_ANY);
  const bool late = result != 0 && errno == ETIMEDOUT;
  pthread_mutex_lock(mutex);
  return late ? ETIMEDOUT : 0;
}

static int wake_condition(struct condition *condition, int count) {
  __atomic_fetch_add(&condition->signals, 1, __ATOMIC_RELEASE);
  syscall(SYS_futex, &condition->signals, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
  return 0;
}

int bionic_pthread_cond_destroy(struct condition *condition) {
  (void)condition;
  return 0;
}

int bionic_pthread_cond_signal(struct condition *condition) { return wake_condition(condition, 1); }

int bionic_pthread_cond_broadcast(struct condition *condition) { return wake_condition(condition, INT_MAX); }

int bionic_pthread_cond_wait(struct condition *condition, pthread_mutex_t *mutex) {
  return wait_condition(condition, mutex, CLOCK_REALTIME, NULL);
}

int bionic_pthread_cond_timedwait(struct condition *condition, pthread_mutex_t *mutex, const struct timespec *until) {
  return wait_condition(condition, mutex, CLOCK_REALTIME, until);
}

int bionic_pthread_cond_clockwait(struct condition *condition, pthread_mutex_t *mutex, clockid_t clock,
                                  const struct timespec *until) {
  return wait_condition(condition, mutex, clock, until);
}

/* Attributes of threads have 56 bytes there, 64 in glibc for Arm. Of them ONNX Runtime sets the size of the stack. */
struct thread_attributes {
  size_t stack_size;
};

int bionic_pthread_attr_init(struct thread_attributes *attributes) {
  attributes->stack_size = 0;
  return 0;
}

int bionic_pthread_attr_setstacksize(struct thread_attributes *attributes, size_t size) {
  attributes->stack_size = size;
  return 0;
}

int bionic_pthread_attr_destroy(struct thread_attributes *attributes) {
  (void)attributes;
  return 0;
}

int bionic_pthread_create(pthread_t *thread, const struct thread_attributes *wanted, void *(*run)(void *), void *data) {
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  if (wanted != NULL && wanted->stack_size > 0) pthread_attr_setstacksize(&attributes, wanted->stack_size);
  const int result = pthread_create(thread, &attributes, run, data);
  pthread_attr_destroy(&attributes);
  return result;
}

int bionic___register_atfork(void (*before)(void), void (*parent)(void), void (*child)(void), void *library) {
  (void)library;
  return pthread_atfork(before, parent, child);
}

/* What ends with a thread, last made first. */
struct ending {
  void (*destroy)(void *);
  void *object;
  struct ending *next;
};
static pthread_key_t endings;
static pthread_once_t endings_made = PTHREAD_ONCE_INIT;

static void run_endings(void *first) {
  for (struct ending *ending = first; ending != NULL;) {
    struct ending *next = ending->next;
    ending->destroy(ending->object);
    free(ending);
    ending = next;
  }
}

static void make_endings(void) { pthread_key_create(&endings, run_endings); }

int bionic___cxa_thread_atexit_impl(void (*destroy)(void *), void *object, void *library) {
  (void)library;
  struct ending *ending = malloc(sizeof *ending);
  if (ending == NULL) return -1;
  pthread_once(&endings_made, make_endings);
  *ending = (struct ending){destroy, object, pthread_getspecific(endings)};
  return pthread_setspecific(endings, ending);
}

/* POSIX's form there, GNU's in glibc. */
int bionic_strerror_r(int error, char *text, size_t size) {
  return snprintf(text, size, "%s", strerror(error)) < (int)size ? 0 : ERANGE;
}

char *bionic___gnu_strerror_r(int error, char *text, size_t size) {
  bionic_strerror_r(error, text, size);
  return text;
}

/* It leaves its argument as it is there. */
char *bionic_dirname(const char *path) {
  static _Thread_local char copy[PATH_MAX];
  snprintf(copy, sizeof copy, "%s", path);
  return dirname(copy);
}

/* ftw.h has other numbers for kinds and flags. */
static _Thread_local int (*visit_entry)(const char *, const struct stat *, int, struct FTW *);

static int translate_entry(const char *path, const struct stat *facts, int kind, struct FTW *place) {
  const int kinds[][2] = {{FTW_F, 0}, {FTW_D, 1}, {FTW_DNR, 2}, {FTW_DP, 3}, {FTW_NS, 4}, {FTW_SL, 5}, {FTW_SLN, 6}};
  int theirs = 4;
  for (size_t index = 0; index < sizeof kinds / sizeof *kinds; index++) {
    if (kinds[index][0] == kind) theirs = kinds[index][1];
  }
  return visit_entry(path, facts, theirs, place);
}

int bionic_nftw(const char *path, int (*visit)(const char *, const struct stat *, int, struct FTW *), int open,
                int flags) {
  visit_entry = visit;
  const int mine = (flags & 1 ? FTW_PHYS : 0) | (flags & 2 ? FTW_MOUNT : 0) | (flags & 4 ? FTW_DEPTH : 0) |
                   (flags & 8 ? FTW_CHDIR : 0);
  return nftw(path, translate_entry, open, mine);
}

/* A long double has 128 bits in vector registers there; here it has 80 bits of the x87 on x86-64. */
#if defined(__x86_64__)
typedef __float128 quad;
#else
typedef long double quad;
#endif

quad bionic_strtold_l(const char *text, char **end, locale_t locale) {
  (void)locale;
  return (quad)strtold(text, end);
}

long long bionic_llroundl(quad number) { return llroundl((long double)number); }

/* C libraries without functions for a locale of their own have one locale. */
long long bionic_strtoll_l(const char *text, char **end, int base, locale_t locale) {
  (void)locale;
  return strtoll(text, end, base);
}

unsigned long long bionic_strtoull_l(const char *text, char **end, int base, locale_t locale) {
  (void)locale;
  return strtoull(text, end, base);
}

/* Functions that check the size of what they write; the size comes last or where its parameter says. */
_Noreturn static void end_overflow(const char *name) {
  fprintf(stderr, "%s: buffer overflow\n", name);
  abort();
}

size_t bionic___strlen_chk(const char *text, size_t size) {
  const size_t length = strlen(text);
  if (length >= size) end_overflow("strlen");
  return length;
}

char *bionic___strchr_chk(const char *text, int letter, size_t size) {
  (void)size;
  return strchr(text, letter);
}

char *bionic___strrchr_chk(const char *text, int letter, size_t size) {
  (void)size;
  return strrchr(text, letter);
}

void *bionic___memcpy_chk(void *to, const void *from, size_t count, size_t size) {
  if (count > size) end_overflow("memcpy");
  return memcpy(to, from, count);
}

void *bionic___memmove_chk(void *to, const void *from, size_t count, size_t size) {
  if (count > size) end_overflow("memmove");
  return memmove(to, from, count);
}

void *bionic___memset_chk(void *to, int byte, size_t count, size_t size) {
  if (count > size) end_overflow("memset");
  return memset(to, byte, count);
}

int bionic___vsnprintf_chk(char *to, size_t count, int flags, size_t size, const char *format, va_list arguments) {
  (void)flags;
  if (count > size) end_overflow("vsnprintf");
  return vsnprintf(to, count, format, arguments);
}

int bionic___vsprintf_chk(char *to, int flags, size_t size, const char *format, va_list arguments) {
  (void)flags;
  const int length = vsnprintf(to, size, format, arguments);
  if (length >= 0 && (size_t)length >= size) end_overflow("vsprintf");
  return length;
}

ssize_t bionic___read_chk(int file, void *to, size_t count, size_t size) {
  if (count > size) end_overflow("read");
  return read(file, to, count);
}

void bionic___FD_SET_chk(int file, fd_set *set, size_t size) {
  if (file < 0 || (size_t)file >= size * 8) end_overflow("FD_SET");
  ((uint64_t *)set)[file / 64] |= UINT64_C(1) << (file % 64);
}

void bionic___FD_CLR_chk(int file, fd_set *set, size_t size) {
  if (file < 0 || (size_t)file >= size * 8) end_overflow("FD_CLR");
  ((uint64_t *)set)[file / 64] &= ~(UINT64_C(1) << (file % 64));
}

int bionic___FD_ISSET_chk(int file, const fd_set *set, size_t size) {
  if (file < 0 || (size_t)file >= size * 8) end_overflow("FD_ISSET");
  return (int)((((const uint64_t *)set)[file / 64] >> (file % 64)) & 1);
}

/* What the phone's CPU can, $EDGEKIT_HWCAP: qemu's may can more, and the kernels that a phone takes must be found. */
unsigned long bionic_getauxval(unsigned long kind) {
  const unsigned long value = getauxval(kind);
  const char *at = getenv("EDGEKIT_HWCAP");
  if (at == NULL || (kind != AT_HWCAP && kind != AT_HWCAP2)) return value;
  char *end = NULL;
  const unsigned long first = strtoul(at, &end, 16);
  return value & (kind == AT_HWCAP ? first : strtoul(*end == ',' ? end + 1 : end, NULL, 16));
}

/* liblog.so and libandroid.so: what they say goes to stderr. */
void bionic_android_set_abort_message(const char *message) { fprintf(stderr, "abort: %s\n", message); }

int bionic___android_log_vprint(int priority, const char *tag, const char *format, va_list arguments) {
  (void)priority;
  fprintf(stderr, "[%s] ", tag);
  vfprintf(stderr, format, arguments);
  return fputc('\n', stderr);
}

int bionic___android_log_print(int priority, const char *tag, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const int result = bionic___android_log_vprint(priority, tag, format, arguments);
  va_end(arguments);
  return result;
}

int bionic___android_log_write(int priority, const char *tag, const char *message) {
  return bionic___android_log_print(priority, tag, "%s", message);
}

/* The name is not passed on: Android cuts one that is long, and this kernel refuses it. */
int bionic_ASharedMemory_create(const char *name, size_t size) {
  (void)name;
  const int file = memfd_create("shared", MFD_CLOEXEC);
  if (file >= 0 && ftruncate(file, (off_t)size) != 0) {
    close(file);
    return -1;
  }
  return file;
}
