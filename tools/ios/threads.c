/* Threads as Apple's C library has them.
 *
 * A mutex, a condition and a once begin there with a word that says what they are, and may be made by a constant alone.
 * What does the work lies behind that word, where a constant leaves zeros: these are what Linux starts from too. So none
 * has to be recognised or converted, which two threads could do at once. */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "image.h"

/* Thread variables. Each is reached through a descriptor: a function to call with it, and the variable's place among
 * all. The function must leave every register but %rax and %rdi alone, so it is this. */
enum { MOST_VARIABLES = 8192 };

struct variable {
  void *find;
  uint64_t key, place;
};

__thread char thread_variables[MOST_VARIABLES] __attribute__((aligned(128)));

extern char darwin__tlv_bootstrap[];
__asm__(
    ".globl darwin__tlv_bootstrap\n"
    "darwin__tlv_bootstrap:\n"
    "  movq %fs:0, %rax\n"
    "  leaq thread_variables@tpoff(%rax), %rax\n"
    "  addq 16(%rdi), %rax\n"
    "  ret\n");

bool make_thread_variables(struct image *image) {
  const struct section *zeros = find_section(image, "__thread_bss");
  const struct section *described = find_section(image, "__thread_vars");
  if (find_section(image, "__thread_data") != NULL) return fail("the object has thread variables with values");
  if (described == NULL) return true;
  if (zeros == NULL || zeros->size > MOST_VARIABLES) return fail("the object has too many thread variables");
  struct variable *variables = (void *)(image->base + described->address);
  for (size_t index = 0; index < described->size / sizeof *variables; index++) {
    /* A place was written as an address in the section; it counts from the section's start. */
    variables[index].place -= (uint64_t)(image->base + zeros->address);
  }
  return true;
}

int __cxa_thread_atexit(void (*destroy)(void *), void *object, void *library);

void darwin__tlv_atexit(void (*destroy)(void *), void *object) { __cxa_thread_atexit(destroy, object, NULL); }

/* pthread_impl.h: 64 bytes, the word in front. */
struct mutex {
  uint64_t signature;
  pthread_mutex_t own;
  char rest[56 - sizeof(pthread_mutex_t)];
};

struct mutex_attributes {
  uint64_t signature;
  int type;
};

enum { RECURSIVE = 2 };

int darwin_pthread_mutexattr_init(struct mutex_attributes *attributes) {
  attributes->type = 0;
  return 0;
}

int darwin_pthread_mutexattr_settype(struct mutex_attributes *attributes, int type) {
  attributes->type = type;
  return 0;
}

int darwin_pthread_mutexattr_destroy(struct mutex_attributes *attributes) {
  (void)attributes;
  return 0;
}

int darwin_pthread_mutex_init(struct mutex *mutex, const struct mutex_attributes *wanted) {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  if (wanted != NULL && wanted->type == RECURSIVE) pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_RECURSIVE);
  mutex->signature = 0x32aaaba7;
  return pthread_mutex_init(&mutex->own, &attributes);
}

int darwin_pthread_mutex_destroy(struct mutex *mutex) { return pthread_mutex_destroy(&mutex->own); }
int darwin_pthread_mutex_lock(struct mutex *mutex) { return pthread_mutex_lock(&mutex->own); }
int darwin_pthread_mutex_trylock(struct mutex *mutex) { return pthread_mutex_trylock(&mutex->own); }
int darwin_pthread_mutex_unlock(struct mutex *mutex) { return pthread_mutex_unlock(&mutex->own); }

/* 48 bytes there, of which Linux's would need all: a number that changes with each signal, and the kernel's queue of
 * those who wait for that. */
struct condition {
  uint64_t signature;
  uint32_t signals;
};

static int wait_condition(struct condition *condition, struct mutex *mutex, const struct timespec *until) {
  const uint32_t seen = __atomic_load_n(&condition->signals, __ATOMIC_ACQUIRE);
  pthread_mutex_unlock(&mutex->own);
  const long result = syscall(SYS_futex, &condition->signals, FUTEX_WAIT_BITSET_PRIVATE | FUTEX_CLOCK_REALTIME, seen,
                              until, NULL, FUTEX_BITSET_MATCH_ANY);
  const bool late = result != 0 && errno == ETIMEDOUT;
  pthread_mutex_lock(&mutex->own);
  /* Apple's number of this error. */
  return late ? 60 : 0;
}

static int wake_condition(struct condition *condition, int count) {
  __atomic_fetch_add(&condition->signals, 1, __ATOMIC_RELEASE);
  syscall(SYS_futex, &condition->signals, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
  return 0;
}

int darwin_pthread_cond_init(struct condition *condition, const void *attributes) {
  (void)attributes;
  *condition = (struct condition){0x3cb0b1bb, 0};
  return 0;
}

int darwin_pthread_cond_signal(struct condition *condition) { return wake_condition(condition, 1); }
int darwin_pthread_cond_broadcast(struct condition *condition) { return wake_condition(condition, INT_MAX); }

int darwin_pthread_cond_wait(struct condition *condition, struct mutex *mutex) {
  return wait_condition(condition, mutex, NULL);
}

int darwin_pthread_cond_timedwait(struct condition *condition, struct mutex *mutex, const struct timespec *until) {
  return wait_condition(condition, mutex, until);
}

static struct timespec add_times(struct timespec now, const struct timespec *more) {
  const long nanoseconds = now.tv_nsec + more->tv_nsec;
  return (struct timespec){now.tv_sec + more->tv_sec + nanoseconds / 1000000000, nanoseconds % 1000000000};
}

int darwin_pthread_cond_timedwait_relative_np(struct condition *condition, struct mutex *mutex,
                                              const struct timespec *span) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  const struct timespec until = add_times(now, span);
  return wait_condition(condition, mutex, &until);
}

/* std::mutex and std::condition_variable are the same things; their functions are libc++'s own. */
void darwin__ZNSt3__15mutex4lockEv(struct mutex *mutex) { pthread_mutex_lock(&mutex->own); }
void darwin__ZNSt3__15mutex6unlockEv(struct mutex *mutex) { pthread_mutex_unlock(&mutex->own); }
bool darwin__ZNSt3__15mutex8try_lockEv(struct mutex *mutex) { return pthread_mutex_trylock(&mutex->own) == 0; }
void darwin__ZNSt3__15mutexD1Ev(struct mutex *mutex) { pthread_mutex_destroy(&mutex->own); }

void darwin__ZNSt3__118condition_variable10notify_oneEv(struct condition *condition) { wake_condition(condition, 1); }

void darwin__ZNSt3__118condition_variable10notify_allEv(struct condition *condition) {
  wake_condition(condition, INT_MAX);
}

struct unique_lock {
  struct mutex *mutex;
  bool owns;
};

void darwin__ZNSt3__118condition_variable4waitERNS_11unique_lockINS_5mutexEEE(struct condition *condition,
                                                                               struct unique_lock *lock) {
  wait_condition(condition, lock->mutex, NULL);
}

/* Until a time of the system's clock, in nanoseconds. */
void darwin__ZNSt3__118condition_variable15__do_timed_waitERNS_11unique_lockINS_5mutexEEENS_6chrono10time_pointINS5_12system_clockENS5_8durationIxNS_5ratioILl1ELl1000000000EEEEEEE(
    struct condition *condition, struct unique_lock *lock, int64_t until) {
  const struct timespec time = {until / 1000000000, until % 1000000000};
  wait_condition(condition, lock->mutex, &time);
}

void darwin__ZNSt3__118condition_variableD1Ev(struct condition *condition) { (void)condition; }

struct once {
  uint64_t signature;
  pthread_once_t own;
};

int darwin_pthread_once(struct once *once, void (*run)(void)) { return pthread_once(&once->own, run); }

/* A key has 8 bytes there and 4 here. */
int darwin_pthread_key_create(uint64_t *key, void (*destroy)(void *)) {
  pthread_key_t made;
  const int result = pthread_key_create(&made, destroy);
  *key = made;
  return result;
}

/* Parameters of scheduling have 8 bytes there and more here. */
int darwin_pthread_getschedparam(pthread_t thread, int *policy, int *priority) {
  (void)thread;
  *policy = 1; /* SCHED_OTHER */
  *priority = 31;
  return 0;
}

/* A set of signals has 4 bytes there and 128 here, and what to do with it counts from 1. */
int darwin_pthread_sigmask(int how, const uint32_t *set, uint32_t *before) {
  sigset_t mine, old;
  sigemptyset(&mine);
  if (set != NULL) memcpy(&mine, set, sizeof *set);
  const int result = pthread_sigmask(how - 1, set != NULL ? &mine : NULL, &old);
  if (before != NULL) memcpy(before, &old, sizeof *before);
  return result;
}

int darwin_pthread_threadid_np(pthread_t thread, uint64_t *number) {
  (void)thread;
  *number = (uint64_t)syscall(SYS_gettid);
  return 0;
}
