/* The dynamic linker of this program: opens the object of a framework for the iOS simulator, and nothing else.
 *
 * The program is linked statically, so that `dlopen` and its kin here are the only ones, for ONNX Runtime as for
 * edgekit's runner. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "image.h"

struct image the_image;

static const rlim_t MOST_MEMORY = (rlim_t)16 << 30;

static char message[4096];
static bool has_message;

bool fail(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  has_message = true;
  return false;
}

/* A model may make ONNX Runtime ask for any memory: what is refused comes back as its own error. */
__attribute__((constructor)) static void limit_process(void) {
  setrlimit(RLIMIT_AS, &(struct rlimit){MOST_MEMORY, MOST_MEMORY});
  setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
}

/* C++ objects of the object's own are made before its first function is called. */
static void run_initialisers(const struct image *image) {
  const struct section *section = find_section(image, "__mod_init_func");
  if (section == NULL) return;
  char *words[] = {"edgekit", NULL};
  void (*const *start)(int, char **, char **, char **) = (void *)(image->base + section->address);
  for (size_t index = 0; index < section->size / sizeof *start; index++) start[index](1, words, environ, words);
}

void *dlopen(const char *path, int flags) {
  (void)flags;
  struct image *image = &the_image;
  if (path == NULL || image->base != NULL) {
    fail("'%s' is not opened here", path == NULL ? "" : path);
    return NULL;
  }
  const bool done = read_object(path, image) && bind_symbols(image) && relocate_sections(image) &&
                    make_thread_variables(image) && register_frames(image) && replace_functions(image);
  if (!done) return NULL;
  run_initialisers(image);
  return image;
}

void *dlsym(void *library, const char *name) {
  char own[256];
  snprintf(own, sizeof own, "_%s", name);
  void *place = library == &the_image ? find_symbol(&the_image, own) : NULL;
  if (place == NULL) fail("there is no function %s", name);
  return place;
}

char *dlerror(void) {
  const bool had = has_message;
  has_message = false;
  return had ? message : NULL;
}

int dlclose(void *library) {
  (void)library;
  return 0;
}

int darwin_dladdr(const void *place, Dl_info *facts) {
  memset(facts, 0, sizeof *facts);
  if (!is_in_image(place)) return 0;
  facts->dli_fname = "onnxruntime";
  facts->dli_fbase = the_image.base;
  return 1;
}
