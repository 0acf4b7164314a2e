// Opens a bundle with its snippet, which is included before this file, and says who took its nodes:
//   run_snippet LIBONNXRUNTIME FOLDER
#include <dlfcn.h>

#include <iostream>
#include <map>

#include "onnxruntime_cxx_api.h"

int main(int, char** argv) {
  void* library = dlopen(argv[1], RTLD_NOW);
  if (library == nullptr) return std::cout << dlerror() << '\n', 1;
  const auto find_base = reinterpret_cast<const OrtApiBase* (*)()>(dlsym(library, "OrtGetApiBase"));
  Ort::InitApi(find_base()->GetApi(ORT_API_VERSION));
  Ort::Env env(ORT_LOGGING_LEVEL_VERBOSE, "snippet");
  try {
    const Ort::Session session = OpenModel(env, argv[2]);
    for (const std::string& name : session.GetInputNames()) std::cout << "input: " << name << '\n';
  } catch (const Ort::Exception& error) {
    return std::cout << error.what() << '\n', 1;
  }
  return 0;
}
