/* Functions of Apple's C library that differ from this program's: other numbers, sizes or promises under one name.
 *
 * What is not here is the same on both. `darwin_NAME` stands for NAME. Numbers are those of Apple's headers. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <libgen.h>
#include <limits.h>
#include <malloc.h>
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

#include "image.h"

int *darwin___error(void) { return &errno; }

FILE *darwin___stderrp, *darwin___stdoutp;
uintptr_t darwin___stack_chk_guard = 0x5bd1e995a7c3f101;

__attribute__((constructor)) static void set_streams(void) {
  darwin___stderrp = stderr;
  darwin___stdoutp = stdout;
}

/* What is made at the start lives as long as the process, which ends without taking it apart. */
int darwin___cxa_atexit(void (*run)(void *), void *object, void *library) {
  (void)run, (void)object, (void)library;
  return 0;
}

/* sys/stat.h */
struct darwin_stat {
  int32_t device;
  uint16_t mode, links;
  uint64_t number;
  uint32_t user, group;
  int32_t special;
  struct timespec accessed, modified, changed, born;
  int64_t size, blocks;
  int32_t block_size;
  uint32_t flags, generation, spare;
  int64_t more[2];
};

static int translate_stat(int result, const struct stat *facts, struct darwin_stat *out) {
  if (result != 0) return result;
  *out = (struct darwin_stat){
      .device = (int32_t)facts->st_dev, .mode = (uint16_t)facts->st_mode, .links = (uint16_t)facts->st_nlink,
      .number = facts->st_ino, .user = facts->st_uid, .group = facts->st_gid, .special = (int32_t)facts->st_rdev,
      .accessed = facts->st_atim, .modified = facts->st_mtim, .changed = facts->st_ctim, .born = facts->st_ctim,
      .size = facts->st_size, .blocks = facts->st_blocks, .block_size = (int32_t)facts->st_blksize};
  return 0;
}

int darwin_stat(const char *path, struct darwin_stat *out) {
  struct stat facts;
  return translate_stat(stat(path, &facts), &facts, out);
}

int darwin_lstat(const char *path, struct darwin_stat *out) {
  struct stat facts;
  return translate_stat(lstat(path, &facts), &facts, out);
}

int darwin_fstat(int file, struct darwin_stat *out) {
  struct stat facts;
  return translate_stat(fstat(file, &facts), &facts, out);
}

/* sys/fcntl.h */
static int flags_of_open(int flags) {
  static const int pairs[][2] = {{0x4, O_NONBLOCK}, {0x8, O_APPEND},    {0x80, O_SYNC},       {0x100, O_NOFOLLOW},
                                 {0x200, O_CREAT},  {0x400, O_TRUNC},   {0x800, O_EXCL},      {0x20000, O_NOCTTY},
                                 {0x100000, O_DIRECTORY}, {0x1000000, O_CLOEXEC}};
  int mine = flags & O_ACCMODE;
  for (size_t index = 0; index < sizeof pairs / sizeof *pairs; index++) {
    if (flags & pairs[index][0]) mine |= pairs[index][1];
  }
  return mine;
}

int darwin_open(const char *path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const unsigned mode = flags & 0x200 ? va_arg(arguments, unsigned) : 0;
  va_end(arguments);
  return open(path, flags_of_open(flags), mode);
}

/* The working directory, as a file. */
static int folder_of(int file) { return file == -2 ? AT_FDCWD : file; }

int darwin_openat(int folder, const char *path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const unsigned mode = flags & 0x200 ? va_arg(arguments, unsigned) : 0;
  va_end(arguments);
  return openat(folder_of(folder), path, flags_of_open(flags), mode);
}

int darwin_unlinkat(int folder, const char *path, int flags) {
  return unlinkat(folder_of(folder), path, flags & 0x80 ? AT_REMOVEDIR : 0);
}

int darwin_renameat(int from, const char *old, int to, const char *new) {
  return renameat(folder_of(from), old, folder_of(to), new);
}

int darwin_linkat(int from, const char *old, int to, const char *new, int flags) {
  return linkat(folder_of(from), old, folder_of(to), new, flags & 0x40 ? AT_SYMLINK_FOLLOW : 0);
}

/* sys/mman.h */
void *darwin_mmap(void *place, size_t size, int rights, int flags, int file, off_t offset) {
  const int mine = (flags & 0x13) | (flags & 0x1000 ? MAP_ANONYMOUS : 0) | (flags & 0x40 ? MAP_NORESERVE : 0);
  return mmap(place, size, rights, mine, flags & 0x1000 ? -1 : file, offset);
}

/* time.h */
static clockid_t clock_of(int clock) {
  switch (clock) {
    case 0: return CLOCK_REALTIME;
    case 12: return CLOCK_PROCESS_CPUTIME_ID;
    case 16: return CLOCK_THREAD_CPUTIME_ID;
    default: return CLOCK_MONOTONIC;
  }
}

int darwin_clock_gettime(int clock, struct timespec *time) { return clock_gettime(clock_of(clock), time); }

uint64_t darwin_clock_gettime_nsec_np(int clock) {
  struct timespec time;
  clock_gettime(clock_of(clock), &time);
  return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

/* unistd.h, sys/sysctl.h. The phone has one CPU: how many threads compute is said with each job. */
long darwin_sysconf(int name) {
  switch (name) {
    case 29: return sysconf(_SC_PAGESIZE);
    case 57:
    case 58: return 1;
    case 200: return sysconf(_SC_PHYS_PAGES);
    default: errno = EINVAL; return -1;
  }
}

int darwin_sysctlbyname(const char *name, void *value, size_t *size, void *wanted, size_t wanted_size) {
  (void)wanted, (void)wanted_size;
  if (value == NULL || size == NULL) return 0;
  memset(value, 0, *size);
  if (strstr(name, "cpu") != NULL || strstr(name, "core") != NULL) *(char *)value = 1;
  return 0;
}

int darwin_sysctl(int *name, unsigned count, void *value, size_t *size, void *wanted, size_t wanted_size) {
  (void)name, (void)count, (void)value, (void)size, (void)wanted, (void)wanted_size;
  errno = ENOENT;
  return -1;
}

struct darwin_utsname {
  char words[5][256];
};

int darwin_uname(struct darwin_utsname *facts) {
  static const char *const words[] = {"Darwin", "simulator", "23.0.0", "edgekit", "x86_64"};
  for (int index = 0; index < 5; index++) strcpy(facts->words[index], words[index]);
  return 0;
}

/* The largest size is in bytes there and in kilobytes here. */
int darwin_getrusage(int who, struct rusage *usage) {
  const int result = getrusage(who, usage);
  usage->ru_maxrss *= 1024;
  return result;
}

int darwin__NSGetExecutablePath(char *path, uint32_t *size) {
  const ssize_t length = readlink("/proc/self/exe", path, *size - 1);
  path[length < 0 ? 0 : length] = '\0';
  return 0;
}

char *darwin_realpath(const char *path, char *real) { return realpath(path, real); }

/* It leaves its argument as it is there. */
char *darwin_dirname(const char *path) {
  static __thread char copy[PATH_MAX];
  snprintf(copy, sizeof copy, "%s", path);
  return dirname(copy);
}

char *darwin_basename(const char *path) {
  static __thread char copy[PATH_MAX];
  snprintf(copy, sizeof copy, "%s", path);
  return basename(copy);
}

/* ftw.h has other numbers for kinds, and its visitor another struct stat. */
static __thread int (*visit_entry)(const char *, const struct darwin_stat *, int, struct FTW *);

static int translate_entry(const char *path, const struct stat *facts, int kind, struct FTW *place) {
  const int kinds[][2] = {{FTW_F, 0}, {FTW_D, 1}, {FTW_DNR, 2}, {FTW_DP, 3}, {FTW_NS, 4}, {FTW_SL, 5}, {FTW_SLN, 6}};
  int theirs = 4;
  for (size_t index = 0; index < sizeof kinds / sizeof *kinds; index++) {
    if (kinds[index][0] == kind) theirs = kinds[index][1];
  }
  struct darwin_stat translated;
  translate_stat(0, facts, &translated);
  return visit_entry(path, &translated, theirs, place);
}

int darwin_nftw(const char *path, int (*visit)(const char *, const struct darwin_stat *, int, struct FTW *), int open,
                int flags) {
  visit_entry = visit;
  const int mine = (flags & 1 ? FTW_PHYS : 0) | (flags & 2 ? FTW_MOUNT : 0) | (flags & 4 ? FTW_DEPTH : 0) |
                   (flags & 8 ? FTW_CHDIR : 0);
  return nftw(path, translate_entry, open, mine);
}

/* string.h */
_Noreturn static void end_overflow(const char *name) {
  fprintf(stderr, "%s: buffer overflow\n", name);
  abort();
}

void *darwin___memcpy_chk(void *to, const void *from, size_t count, size_t size) {
  if (count > size) end_overflow("memcpy");
  return memcpy(to, from, count);
}

void *darwin___memset_chk(void *to, int byte, size_t count, size_t size) {
  if (count > size) end_overflow("memset");
  return memset(to, byte, count);
}

size_t darwin___strlcpy_chk(char *to, const char *from, size_t count, size_t size) {
  if (count > size) end_overflow("strlcpy");
  const size_t length = strlen(from);
  if (count > 0) {
    const size_t taken = length < count ? length : count - 1;
    memcpy(to, from, taken);
    to[taken] = '\0';
  }
  return length;
}

size_t darwin___strlcat_chk(char *to, const char *from, size_t count, size_t size) {
  const size_t length = strnlen(to, count);
  return length + darwin___strlcpy_chk(to + length, from, count - length, size - length);
}

void darwin___bzero(void *to, size_t count) { memset(to, 0, count); }

void darwin_memset_pattern16(char *to, const void *pattern, size_t count) {
  for (size_t at = 0; at < count; at += 16) memcpy(to + at, pattern, count - at < 16 ? count - at : 16);
}

/* The locale comes before the format. */
int darwin_vsnprintf_l(char *to, size_t count, void *locale, const char *format, va_list arguments) {
  (void)locale;
  return vsnprintf(to, count, format, arguments);
}

/* math.h: both come back in registers. */
struct doubles {
  double sine, cosine;
};

struct floats {
  float sine, cosine;
};

struct doubles darwin___sincos_stret(double angle) { return (struct doubles){sin(angle), cos(angle)}; }
struct floats darwin___sincosf_stret(float angle) { return (struct floats){sinf(angle), cosf(angle)}; }
double darwin___exp10(double power) { return pow(10, power); }

/* malloc/malloc.h: all zones are one. */
static char zone[1024];

void *darwin_malloc_default_zone(void) { return zone; }

void *darwin_malloc_create_zone(size_t size, unsigned flags) {
  (void)size, (void)flags;
  return zone;
}

void darwin_malloc_set_zone_name(void *own, const char *name) { (void)own, (void)name; }

void *darwin_malloc_zone_malloc(void *own, size_t size) {
  (void)own;
  return malloc(size);
}

void *darwin_malloc_zone_realloc(void *own, void *block, size_t size) {
  (void)own;
  return realloc(block, size);
}

void darwin_malloc_zone_free(void *own, void *block) {
  (void)own;
  free(block);
}

size_t darwin_malloc_size(void *block) { return malloc_usable_size(block); }

/* Functions that this C library lacks. */
int darwin_backtrace(void **places, int most) {
  (void)places, (void)most;
  return 0;
}

char **darwin_backtrace_symbols(void *const *places, int count) {
  (void)places, (void)count;
  return NULL;
}

void darwin_srandomdev(void) { srandom((unsigned)time(NULL)); }

void darwin___stack_chk_fail(void) { end_overflow("stack"); }

/* Other numbers and structures, of which telemetry alone would make use: these say that they cannot. */
static int refuse(void) {
  errno = ENOSYS;
  return -1;
}

int darwin_fcntl(int file, int command, ...) {
  (void)file, (void)command;
  return refuse();
}

int darwin_fsctl(void) { return refuse(); }
int darwin_statfs(void) { return refuse(); }
int darwin_fstatfs(void) { return refuse(); }
int darwin_utimes(void) { return refuse(); }
int darwin_futimes(void) { return refuse(); }
size_t darwin_confstr(void) { return 0; }

int darwin_getpwuid_r(uint32_t user, void *entry, char *room, size_t size, void **found) {
  (void)user, (void)entry, (void)room, (void)size;
  *found = NULL;
  return 0;
}
