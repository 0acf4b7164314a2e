// main OBJECT CHECK [NAME]: opens the object with edgekit's loader and ends with 0 if its `check_CHECK` returns 1. With
// a name, what this machine has under it takes the place of what stands in for Apple's. A `$` chooses a variant of it.
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <string>

#include "image.h"

extern "C" const import own_places[];
extern "C" const unsigned own_count;

// ONNX Runtime's functions are not in this object.
bool replace_functions(image*) { return true; }

namespace {

bool has_name(const import& entry, const std::string& name) {
  const std::string own = entry.name;
  return own.substr(0, own.find('$')) == name;
}

void* find_own(const std::string& name) {
  for (unsigned index = 0; index < own_count; ++index) {
    if (has_name(own_places[index], name)) return own_places[index].place;
  }
  return nullptr;
}

bool take_away(const std::string& name) {
  for (unsigned index = 0; index < import_count; ++index) {
    if (!has_name(imports[index], name)) continue;
    void** place = const_cast<void**>(&imports[index].place);
    const auto page = reinterpret_cast<std::uintptr_t>(place) & ~static_cast<std::uintptr_t>(getpagesize() - 1);
    if (mprotect(reinterpret_cast<void*>(page), 2 * getpagesize(), PROT_READ | PROT_WRITE) != 0) return false;
    *place = find_own(name);
    return true;
  }
  return false;
}

}  // namespace

int main(int count, char** words) {
  if (count < 3 || (count == 4 && !take_away(words[3]))) return 3;
  void* library = dlopen(words[1], RTLD_NOW);
  void* place = library == nullptr ? nullptr : dlsym(library, ("check_" + std::string(words[2])).c_str());
  if (place == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 2;
  }
  return reinterpret_cast<int (*)()>(place)() == 1 ? 0 : 1;
}
