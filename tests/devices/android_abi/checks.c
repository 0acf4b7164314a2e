/* A library as a compiler for Android makes one: it knows Android's numbers and sizes, and no header of this machine.
 * Each check is of the function in its name, and returns 1 where that is Android's. */
#include <stdarg.h>
#include <stdint.h>

typedef unsigned long size_t;
typedef long ssize_t;
#define CHECK(name) int check_##name(void)
#define NULL ((void *)0)

extern char __sF[3][152];
#define STDIN ((void *)__sF[0])
#define STDOUT ((void *)__sF[1])
#define STDERR ((void *)__sF[2])

int *__errno(void);
void *memset(void *, int, size_t);
int memcmp(const void *, const void *, size_t);
int strcmp(const char *, const char *);
size_t strlen(const char *);
int close(int);
ssize_t read(int, void *, size_t);
int pipe(int *);
int usleep(unsigned);

/* Returns 1 if no byte of a guard was written. */
static int is_whole(const unsigned char *guard, size_t size) {
  for (size_t at = 0; at < size; at++) {
    if (guard[at] != 0xa5) return 0;
  }
  return 1;
}

CHECK(__errno) { return close(-1) == -1 && *__errno() == 9; }

long sysconf(int);
CHECK(sysconf) { return sysconf(0x27) == 4096 && sysconf(0x28) == 4096 && sysconf(0x61) >= 1 && sysconf(0x1000) == -1; }

long pathconf(const char *, int);
CHECK(pathconf) { return pathconf("/", 4) == 255 && pathconf("/", 5) == 4096; }

int __system_property_get(const char *, char *);
CHECK(__system_property_get) {
  char value[92];
  return __system_property_get("ro.build.version.sdk", value) == 2 && !strcmp(value, "31") &&
         __system_property_get("ro.product.model", value) == 0 && value[0] == '\0';
}

unsigned long getauxval(unsigned long);
CHECK(getauxval) { /* AT_HWCAP and AT_HWCAP2 are what the phone has of this machine's, all others are this machine's */
  return getauxval(16) == 0 && (getauxval(26) & ~2ul) == 0 && getauxval(6) == 4096;
}

int sigfillset(uint64_t *);
CHECK(sigfillset) {
  uint64_t set[20];
  memset(set, 0xa5, sizeof set);
  return sigfillset(set) == 0 && set[0] == ~0ul && is_whole((unsigned char *)(set + 1), sizeof set - 8);
}

int pthread_sigmask(int, const uint64_t *, uint64_t *);
void *mmap(void *, size_t, int, int, int, long);
int munmap(void *, size_t);
CHECK(pthread_sigmask) { /* behind the set there is nothing */
  char *pages = mmap(NULL, 8192, 3, 0x22, -1, 0);
  uint64_t *set = (uint64_t *)(pages + 4088), before = 0;
  *set = ~0ul;
  munmap(pages + 4096, 4096);
  return pthread_sigmask(2, set, NULL) == 0 && pthread_sigmask(2, NULL, &before) == 0 && (before >> 9 & 1) == 1;
}

int strerror_r(int, char *, size_t);
CHECK(strerror_r) {
  char text[128] = "";
  return strerror_r(2, text, sizeof text) == 0 && strlen(text) > 5 && strerror_r(2, text, 3) != 0;
}

char *__gnu_strerror_r(int, char *, size_t);
CHECK(__gnu_strerror_r) {
  char text[128] = "";
  return strlen(__gnu_strerror_r(2, text, sizeof text)) > 5;
}

char *dirname(const char *);
CHECK(dirname) {
  char path[] = "a/b";
  return !strcmp(dirname(path), "a") && !strcmp(path, "a/b");
}

int nftw(const char *, int (*)(const char *, const void *, int, void *), int, int);
static int seen[16], seen_count;
static int note_kind(const char *path, const void *facts, int kind, void *place) {
  (void)path, (void)facts, (void)place;
  if (seen_count < 16) seen[seen_count++] = kind;
  return 0;
}
CHECK(nftw) { /* `folder` holds one file: 0 is a file, 3 a folder after what is in it, which flag 4 asks for */
  return nftw("folder", note_kind, 8, 4) == 0 && seen_count == 2 && seen[0] == 0 && seen[1] == 3;
}

#if defined(__x86_64__)
typedef __float128 quad;
#else
typedef long double quad;
#endif
quad strtold_l(const char *, char **, void *);
CHECK(strtold_l) { return strtold_l("1.5", NULL, NULL) * 2 == 3; }

long long llroundl(quad);
CHECK(llroundl) { return llroundl((quad)2.5) == 3 && llroundl((quad)-7) == -7; }

size_t __strlen_chk(const char *, size_t);
CHECK(__strlen_chk) { return __strlen_chk("abc", 4) == 3; }
char *__strchr_chk(const char *, int, size_t);
CHECK(__strchr_chk) { return *__strchr_chk("abc", 'b', 4) == 'b'; }
char *__strrchr_chk(const char *, int, size_t);
CHECK(__strrchr_chk) { return !strcmp(__strrchr_chk("abcbd", 'b', 6), "bd"); }
void *__memcpy_chk(void *, const void *, size_t, size_t);
CHECK(__memcpy_chk) { char to[4]; return __memcpy_chk(to, "abc", 4, 4) == to && !strcmp(to, "abc"); }
void *__memmove_chk(void *, const void *, size_t, size_t);
CHECK(__memmove_chk) { char to[5] = "abc"; __memmove_chk(to + 1, to, 3, 4); return !strcmp(to, "aabc"); }
void *__memset_chk(void *, int, size_t, size_t);
CHECK(__memset_chk) { char to[3] = ""; __memset_chk(to, 'x', 2, 3); return !strcmp(to, "xx"); }
int __vsnprintf_chk(char *, size_t, int, size_t, const char *, va_list);
int __vsprintf_chk(char *, int, size_t, const char *, va_list);
static int format(char *to, int limited, const char *format_text, ...) {
  va_list arguments;
  va_start(arguments, format_text);
  const int length = limited ? __vsnprintf_chk(to, 4, 0, 8, format_text, arguments)
                             : __vsprintf_chk(to, 0, 8, format_text, arguments);
  va_end(arguments);
  return length;
}
CHECK(__vsnprintf_chk) { char to[8]; return format(to, 1, "%d", 12345) == 5 && !strcmp(to, "123"); }
CHECK(__vsprintf_chk) { char to[8]; return format(to, 0, "%d", 12345) == 5 && !strcmp(to, "12345"); }
ssize_t __read_chk(int, void *, size_t, size_t);
CHECK(__read_chk) { char to[2]; return __read_chk(0, to, 2, 2) == 2 && to[0] == 'l'; }

void __FD_SET_chk(int, void *, size_t);
int __FD_ISSET_chk(int, const void *, size_t);
void __FD_CLR_chk(int, void *, size_t);
CHECK(__FD_SET_chk) { uint64_t set[16] = {0}; __FD_SET_chk(70, set, 128); return set[1] == 64; }
CHECK(__FD_ISSET_chk) { uint64_t set[16] = {0, 64}; return __FD_ISSET_chk(70, set, 128) && !__FD_ISSET_chk(6, set, 128); }
CHECK(__FD_CLR_chk) { uint64_t set[16] = {0, 65}; __FD_CLR_chk(70, set, 128); return set[1] == 1; }

/* Objects of threads. They lie 4 bytes behind a multiple of 8, as Android's alignment of 4 allows. */
struct guarded {
  unsigned char before[4], object[64], guard[64];
} __attribute__((aligned(8)));
static void *object_of(struct guarded *guarded, size_t size) {
  memset(guarded, 0xa5, sizeof *guarded);
  memset(guarded->object, 0, size);
  return guarded->object;
}

int pthread_mutex_init(void *, const void *);
int pthread_mutex_lock(void *);
int pthread_mutex_unlock(void *);
CHECK(pthread_mutex_init) {
  struct guarded guarded;
  void *mutex = object_of(&guarded, 40);
  return pthread_mutex_init(mutex, NULL) == 0 && pthread_mutex_lock(mutex) == 0 && pthread_mutex_unlock(mutex) == 0 &&
         is_whole(guarded.object + 40, 24) && is_whole(guarded.guard, 64);
}

int pthread_attr_init(void *);
int pthread_attr_destroy(void *);
int pthread_attr_setstacksize(void *, size_t);
int pthread_create(void *, const void *, void *(*)(void *), void *);
int pthread_join(unsigned long, void **);
unsigned long pthread_self(void);
int pthread_getattr_np(unsigned long, void *);
int pthread_attr_getstacksize(const void *, size_t *);
enum { STACK = 3 << 20 };

static void *measure_stack(void *size) {
  uint64_t attributes[32]; /* of this machine's kind */
  pthread_getattr_np(pthread_self(), attributes);
  pthread_attr_getstacksize(attributes, size);
  return NULL;
}
static int make_thread(int ended) {
  struct guarded guarded;
  void *attributes = object_of(&guarded, 56);
  memset(attributes, 0xa5, 56);
  unsigned long thread = 0;
  size_t size = 0;
  if (pthread_attr_init(attributes) != 0 || pthread_attr_setstacksize(attributes, STACK) != 0) return 0;
  if (pthread_create(&thread, attributes, measure_stack, &size) != 0 || pthread_join(thread, NULL) != 0) return 0;
  if (ended) pthread_attr_destroy(attributes);
  return size >= STACK && size < STACK + (1 << 20) && is_whole(guarded.object + 56, 8) && is_whole(guarded.guard, 64);
}
CHECK(pthread_attr_init) { return make_thread(0); }
CHECK(pthread_attr_setstacksize) { return make_thread(0); }
CHECK(pthread_create) { return make_thread(0); }
CHECK(pthread_attr_destroy) { return make_thread(1); }

struct timespec { long seconds, nanoseconds; };
int clock_gettime(int, struct timespec *);
int pthread_cond_destroy(void *);
int pthread_cond_wait(void *, void *);
int pthread_cond_timedwait(void *, void *, const struct timespec *);
int pthread_cond_clockwait(void *, void *, int, const struct timespec *);
int pthread_cond_signal(void *);
int pthread_cond_broadcast(void *);

static struct guarded condition;
static uint64_t mutex[5];
static volatile int go, through;
static void *wait_for_go(void *data) {
  (void)data;
  pthread_mutex_lock(mutex);
  while (!go) pthread_cond_wait(condition.object, mutex);
  through++;
  pthread_mutex_unlock(mutex);
  return NULL;
}
/* Two threads wait; both must come through soon after they are woken. */
static int wake_two(int all) {
  unsigned long threads[2];
  object_of(&condition, 48);
  for (int index = 0; index < 2; index++) pthread_create(&threads[index], NULL, wait_for_go, NULL);
  usleep(50000);
  pthread_mutex_lock(mutex);
  go = 1;
  pthread_mutex_unlock(mutex);
  if (all) pthread_cond_broadcast(condition.object);
  else pthread_cond_signal(condition.object), pthread_cond_signal(condition.object);
  for (int turn = 0; turn < 100 && through < 2; turn++) usleep(10000);
  return through == 2 && is_whole(condition.guard, 64);
}
CHECK(pthread_cond_wait) { return wake_two(1); }
CHECK(pthread_cond_broadcast) { return wake_two(1); }
CHECK(pthread_cond_signal) { return wake_two(0); }

static int wait_late(int clock) {
  struct timespec soon;
  object_of(&condition, 48);
  clock_gettime(clock, &soon);
  soon.seconds += soon.nanoseconds > 900000000;
  soon.nanoseconds = (soon.nanoseconds + 50000000) % 1000000000;
  pthread_mutex_lock(mutex);
  const int result = clock == 0 ? pthread_cond_timedwait(condition.object, mutex, &soon)
                                : pthread_cond_clockwait(condition.object, mutex, clock, &soon);
  pthread_mutex_unlock(mutex);
  return result == 110;
}
CHECK(pthread_cond_timedwait) { return wait_late(0); }
CHECK(pthread_cond_clockwait) { return wait_late(1); }
CHECK(pthread_cond_destroy) { /* glibc's waits for those who wait, which it reads out of the object */
  object_of(&condition, 48);
  memset(condition.object, 0x5a, 48);
  return pthread_cond_destroy(condition.object) == 0;
}

int __register_atfork(void (*)(void), void (*)(void), void (*)(void), void *);
int fork(void);
static void note_fork(void) { seen_count++; }
CHECK(__register_atfork) {
  return __register_atfork(note_fork, NULL, NULL, NULL) == 0 && (fork() >= 0) && seen_count == 1;
}

int __cxa_thread_atexit_impl(void (*)(void *), void *, void *);
static void append_digit(void *digit) { seen_count = seen_count * 10 + *(int *)digit; }
static int one = 1, two = 2;
static void *end_with_two(void *data) {
  (void)data;
  __cxa_thread_atexit_impl(append_digit, &one, NULL);
  __cxa_thread_atexit_impl(append_digit, &two, NULL);
  return NULL;
}
CHECK(__cxa_thread_atexit_impl) {
  unsigned long thread = 0;
  return pthread_create(&thread, NULL, end_with_two, NULL) == 0 && pthread_join(thread, NULL) == 0 && seen_count == 21;
}

/* Streams: stdin is a file with "line\nnext\n". */
int fclose(void *), fflush(void *), fileno(void *), fputc(int, void *), putc(int, void *), fputs(const char *, void *);
int getc(void *), ungetc(int, void *), fseek(void *, long, int), fseeko(void *, long, int);
unsigned fputwc(int, void *), getwc(void *), ungetwc(unsigned, void *);
long ftello(void *);
size_t fread(void *, size_t, size_t, void *), fwrite(const void *, size_t, size_t, void *);
int fprintf(void *, const char *, ...), vfprintf(void *, const char *, va_list);
CHECK(__sF) { return fileno(STDIN) == 0 && fileno(STDERR) == 2; }
CHECK(fileno) { return fileno(STDOUT) == 1; }
CHECK(fclose) { return fclose(STDIN) == 0; }
CHECK(fflush) { return fputs("a", STDOUT) >= 0 && fflush(STDOUT) == 0 && fflush(NULL) == 0; }
CHECK(fputc) { return fputc('a', STDERR) == 'a'; }
CHECK(putc) { return putc('a', STDERR) == 'a'; }
CHECK(fputs) { return fputs("a", STDERR) >= 0; }
CHECK(fputwc) { return fputwc('a', STDERR) == 'a'; }
CHECK(fseek) { return fseek(STDIN, 5, 0) == 0 && getc(STDIN) == 'n'; }
CHECK(fseeko) { return fseeko(STDIN, 5, 0) == 0 && getc(STDIN) == 'n'; }
CHECK(ftello) { return getc(STDIN) == 'l' && ftello(STDIN) == 1; }
CHECK(getc) { return getc(STDIN) == 'l'; }
CHECK(getwc) { return getwc(STDIN) == 'l'; }
CHECK(ungetc) { return getc(STDIN) == 'l' && ungetc('l', STDIN) == 'l' && getc(STDIN) == 'l'; }
CHECK(ungetwc) { return getwc(STDIN) == 'l' && ungetwc('l', STDIN) == 'l' && getwc(STDIN) == 'l'; }
CHECK(fread) { char to[4]; return fread(to, 1, 4, STDIN) == 4 && !memcmp(to, "line", 4); }
CHECK(fwrite) { return fwrite("abc", 1, 3, STDERR) == 3; }
CHECK(fprintf) { return fprintf(STDERR, "%d%s", 12, "c") == 3; }
static int print(const char *text, ...) {
  va_list arguments;
  va_start(arguments, text);
  const int length = vfprintf(STDERR, text, arguments);
  va_end(arguments);
  return length;
}
CHECK(vfprintf) { return print("%d%s", 12, "c") == 3; }

/* The phone's /proc/cpuinfo says "phone", and it has one entry below /sys/devices. */
int open(const char *, int, ...), __open_2(const char *, int), access(const char *, int), stat(const char *, void *);
void *fopen(const char *, const char *), *opendir(const char *), *readdir(void *);
static int says_phone(int file) { char to[5]; return read(file, to, 5) == 5 && !memcmp(to, "phone", 5); }
CHECK(open) { return says_phone(open("/proc/cpuinfo", 0)) && open("/proc/self/status", 0) >= 0; }
CHECK(__open_2) { return says_phone(__open_2("/proc/cpuinfo", 0)); }
CHECK(fopen) { char to[5]; void *file = fopen("/proc/cpuinfo", "r"); return fread(to, 1, 5, file) == 5 && !memcmp(to, "phone", 5); }
CHECK(access) { return access("/sys/devices/only_here", 0) == 0 && access("/sys/devices/system", 0) != 0; }
CHECK(stat) { char facts[256]; return stat("/sys/devices/only_here", facts) == 0; }
CHECK(opendir) {
  void *folder = opendir("/sys/devices/");
  int entries = 0;
  while (folder != NULL && readdir(folder) != NULL) entries++;
  return entries == 3;
}

void android_set_abort_message(const char *);
int __android_log_print(int, const char *, const char *, ...), __android_log_write(int, const char *, const char *);
int __android_log_vprint(int, const char *, const char *, va_list), ASharedMemory_create(const char *, size_t);
long lseek(int, long, int);
CHECK(android_set_abort_message) { android_set_abort_message("why"); return 1; }
CHECK(__android_log_print) { return __android_log_print(4, "tag", "%d", 1) >= 0; }
CHECK(__android_log_write) { return __android_log_write(4, "tag", "text") >= 0; }
static int log_text(const char *text, ...) {
  va_list arguments;
  va_start(arguments, text);
  const int result = __android_log_vprint(4, "tag", text, arguments);
  va_end(arguments);
  return result;
}
CHECK(__android_log_vprint) { return log_text("%d", 1) >= 0; }
CHECK(ASharedMemory_create) { /* a name of any length */
  char name[400];
  memset(name, 110, sizeof name - 1);
  name[sizeof name - 1] = 0;
  return lseek(ASharedMemory_create("name", 100), 0, 2) == 100 && lseek(ASharedMemory_create(name, 7), 0, 2) == 7;
}

long long strtoll_l(const char *, char **, int, void *);
unsigned long long strtoull_l(const char *, char **, int, void *);
CHECK(strtoll_l) { return strtoll_l("-12", NULL, 10, NULL) == -12; }
CHECK(strtoull_l) { return strtoull_l("ff", NULL, 16, NULL) == 255; }

/* What the loader answers for itself. */
struct places { const char *file; void *base; const char *name; void *at; };
int dladdr(const void *, struct places *);
void *dlopen(const char *, int), *dlsym(void *, const char *);
CHECK(dladdr) { struct places places; return dladdr((void *)check_dladdr, &places) != 0 && places.file[0] == '/'; }
CHECK(dlopen) { return dlopen("libvulkan.so", 2) == NULL && dlsym(dlopen("libc.so", 2), "strlen") != NULL; }
