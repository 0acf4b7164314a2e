/* Android's own ONNX Runtime for a Java machine of this PC: loads its two libraries with the loader of `tools/android`,
 * and hands each native method that the second exports on to it (`natives.S`, made by `android_parts.py`). */
#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>

extern const char *const native_names[];
extern void *native_places[];

static void *open_library(const char *name) {
  char path[PATH_MAX];
  snprintf(path, sizeof path, "%s/%s", getenv("EDGEKIT_ANDROID_LIBRARIES"), name);
  void *library = dlopen(path, 0);
  if (library == NULL) {
    fprintf(stderr, "%s\n", dlerror());
    abort();
  }
  return library;
}

__attribute__((visibility("default"))) int JNI_OnLoad(void *machine, void *reserved) {
  open_library("libonnxruntime.so");
  void *binding = open_library("libonnxruntime4j_jni.so");
  for (unsigned index = 0; native_names[index] != NULL; index++) {
    native_places[index] = dlsym(binding, native_names[index]);
  }
  int (*start)(void *, void *) = (int (*)(void *, void *))dlsym(binding, "JNI_OnLoad");
  return start(machine, reserved);
}
