/* main LIBRARY NAME: opens the library with edgekit's loader and ends with 0 if its `check_NAME` returns 1. */
#include <dlfcn.h>
#include <stdio.h>

int main(int count, char **words) {
  char name[128];
  void *library = count == 3 ? dlopen(words[1], RTLD_NOW) : NULL;
  if (library == NULL) {
    fprintf(stderr, "%s\n", dlerror());
    return 2;
  }
  snprintf(name, sizeof name, "check_%s", words[2]);
  int (*check)(void) = (int (*)(void))dlsym(library, name);
  if (check == NULL) {
    fprintf(stderr, "%s\n", dlerror());
    return 2;
  }
  return check() == 1 ? 0 : 1;
}
