// main OBJECT NAME: opens the object with edgekit's loader and ends with 0 if its `check_NAME` returns 1.
#include <dlfcn.h>

#include <cstdio>
#include <string>

#include "image.h"

// ONNX Runtime's functions are not in this object.
bool replace_functions(image*) { return true; }

int main(int count, char** words) {
  void* library = count == 3 ? dlopen(words[1], RTLD_NOW) : nullptr;
  void* place = library == nullptr ? nullptr : dlsym(library, ("check_" + std::string(words[2])).c_str());
  if (place == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 2;
  }
  return reinterpret_cast<int (*)()>(place)() == 1 ? 0 : 1;
}
