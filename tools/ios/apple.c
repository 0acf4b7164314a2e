/* Apple's frameworks, which are not here. ONNX Runtime asks them for its log and its telemetry, and for Core ML, whose
 * part in it is replaced (coreml.cpp). What is only asked gets the answer "nothing"; what would have to do something
 * ends the program with its name, so that nothing is computed that a phone would compute otherwise. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "image.h"

_Noreturn static void end_missing(const char *name) {
  fprintf(stderr, "%s is not on this machine\n", name);
  abort();
}

/* Which release of iOS it is: $EDGEKIT_IOS, such as 17 or 17.4. */
int darwin___isPlatformVersionAtLeast(unsigned platform, unsigned major, unsigned minor, unsigned patch) {
  (void)platform, (void)patch;
  const char *release = getenv("EDGEKIT_IOS");
  unsigned mine = 17, detail = 0;
  if (release != NULL) sscanf(release, "%u.%u", &mine, &detail);
  return mine > major || (mine == major && detail >= minor);
}

/* Classes, and objects of none: a message to one comes back as nothing. */
char apple_object[4096];
char darwin__NSConcreteGlobalBlock[256], darwin__NSConcreteStackBlock[256], darwin___CFConstantStringClassReference[256];
void *darwin_kCFAllocatorDefault;
char darwin___dso_handle;

void *darwin_objc_msgSend(void) { return apple_object; }
void *darwin_objc_alloc(void) { return apple_object; }
void *darwin_objc_alloc_init(void) { return apple_object; }
void *darwin_objc_autoreleasePoolPush(void) { return apple_object; }
void darwin_objc_autoreleasePoolPop(void) {}
void *darwin_objc_retain(void *object) { return object; }
void *darwin_objc_retainAutorelease(void *object) { return object; }
void *darwin_objc_retainAutoreleasedReturnValue(void *object) { return object; }
void *darwin_objc_autoreleaseReturnValue(void *object) { return object; }
void *darwin_objc_retainBlock(void *object) { return object; }
void darwin_objc_release(void *object) { (void)object; }
void darwin_objc_enumerationMutation(void) { end_missing("objc_enumerationMutation"); }
void darwin__Block_object_assign(void) { end_missing("_Block_object_assign"); }
void darwin__Block_object_dispose(void) { end_missing("_Block_object_dispose"); }

/* A constant string of Foundation: its class, flags, letters and length. */
struct constant_string {
  void *kind;
  uint64_t flags;
  const char *letters;
  uint64_t length;
};

/* ONNX Runtime's log, in words of C; shown where $EDGEKIT_IOS_LOG is set. */
void darwin_NSLog(const struct constant_string *format, ...) {
  if (getenv("EDGEKIT_IOS_LOG") == NULL) return;
  va_list arguments;
  va_start(arguments, format);
  vfprintf(stderr, format->letters, arguments);
  va_end(arguments);
  fputc('\n', stderr);
}

void *darwin_NSTemporaryDirectory(void) { return apple_object; }

double darwin_CFAbsoluteTimeGetCurrent(void) { return 0; }
void darwin_CFRelease(void) {}
int darwin_CFStringGetCString(void) { return 0; }
void *darwin_CFStringGetCStringPtr(void) { return NULL; }
long darwin_CFStringGetLength(void) { return 0; }
long darwin_CFStringGetMaximumSizeForEncoding(void) { return 0; }
void *darwin_CFTimeZoneCopyDefault(void) { return NULL; }
void *darwin_CFTimeZoneCopySystem(void) { return NULL; }
void *darwin_CFTimeZoneGetName(void) { return NULL; }
double darwin_CFTimeZoneGetSecondsFromGMT(void) { return 0; }
void *darwin_CFUUIDCreate(void) { return NULL; }
void *darwin_CFUUIDCreateString(void) { return NULL; }

/* What names files and nodes must differ within the process, and should be the same in the next one. */
void darwin_uuid_generate(unsigned char *id) {
  static unsigned count;
  const unsigned number = __atomic_add_fetch(&count, 1, __ATOMIC_RELAXED);
  memset(id, 0, 16);
  memcpy(id + 12, &number, sizeof number);
}

void darwin_uuid_unparse(const unsigned char *id, char *text) {
  for (int index = 0; index < 16; index++) {
    const char *dash = index == 4 || index == 6 || index == 8 || index == 10 ? "-" : "";
    text += sprintf(text, "%s%02X", dash, id[index]);
  }
}

/* A block is an object whose third word is its function. */
struct block {
  void *kind;
  uint64_t flags;
  void (*run)(struct block *);
};

void darwin_dispatch_once(uint64_t *done, struct block *block) {
  static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  pthread_mutex_lock(&mutex);
  /* Code that finds all bits set does not ask again. */
  if (*done == 0) block->run(block);
  __atomic_store_n(done, ~UINT64_C(0), __ATOMIC_RELEASE);
  pthread_mutex_unlock(&mutex);
}

void darwin_dispatch_apply_f(size_t count, void *queue, void *context, void (*run)(void *, size_t)) {
  (void)queue;
  for (size_t index = 0; index < count; index++) run(context, index);
}

void *darwin_dispatch_get_global_queue(void) { return apple_object; }
void darwin_dispatch_release(void) {}
void *darwin_dispatch_semaphore_create(void) { end_missing("dispatch_semaphore_create"); }
long darwin_dispatch_semaphore_signal(void) { end_missing("dispatch_semaphore_signal"); }
long darwin_dispatch_semaphore_wait(void) { end_missing("dispatch_semaphore_wait"); }
uint64_t darwin_dispatch_time(void) { end_missing("dispatch_time"); }

void *darwin_nw_path_monitor_create(void) { return NULL; }
void darwin_nw_path_monitor_cancel(void) {}
void darwin_nw_path_monitor_set_queue(void) {}
void darwin_nw_path_monitor_set_update_handler(void) {}
void darwin_nw_path_monitor_start(void) {}
int darwin_nw_path_get_status(void) { return 0; }
int darwin_nw_path_is_constrained(void) { return 0; }
int darwin_nw_path_is_expensive(void) { return 0; }
int darwin_nw_path_uses_interface_type(void) { return 0; }
