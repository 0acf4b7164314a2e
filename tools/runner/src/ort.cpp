#include "ort.h"

#include <dlfcn.h>
#include <unistd.h>

#include <climits>

#include "failure.h"

namespace edgekit {
namespace {

struct ApiBase {
  const void* (*GetApi)(std::uint32_t version);
  const char* (*GetVersionString)();
};

constexpr const char* kLibrary = "libonnxruntime.so";
constexpr unsigned kFirstOf22 = 285;  // the first place of the table that came with this version
constexpr unsigned kFirstOf24 = 390;

std::string folder_of_program() {
  char path[PATH_MAX];
  const ssize_t length = readlink("/proc/self/exe", path, sizeof path);
  const std::string name = length > 0 ? std::string(path, static_cast<std::size_t>(length)) : "";
  return name.substr(0, name.rfind('/') + 1);
}

void* open_library(const std::string& path) {
  if (!path.empty()) return dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  const std::string folder = folder_of_program();
  void* library = folder.empty() ? nullptr : dlopen((folder + kLibrary).c_str(), RTLD_NOW | RTLD_LOCAL);
  return library != nullptr ? library : dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
}

}  // namespace

Ort::Ort(const std::string& path) : library_(open_library(path)) {
  if (library_ == nullptr) {
    const char* reason = dlerror();
    throw Failure(std::string("cannot open ONNX Runtime: ") + (reason != nullptr ? reason : "no reason given"));
  }
  const auto get_base = reinterpret_cast<const ApiBase* (*)()>(symbol("OrtGetApiBase"));
  if (get_base == nullptr) throw Failure(quoted(path) + " is no ONNX Runtime: it has no OrtGetApiBase");
  const ApiBase* base = get_base();
  version_ = base->GetVersionString();
  const std::size_t dot = version_.find('.');
  const unsigned minor = dot == std::string::npos ? 0 : static_cast<unsigned>(std::atoi(version_.c_str() + dot + 1));
  api_ = minor >= kPlacementSince ? kPlacementSince : minor >= kPluginsSince ? kPluginsSince : 17;
  const auto* table = static_cast<const void* const*>(base->GetApi(api_));
  if (table == nullptr) throw Failure("ONNX Runtime " + version_ + " is too old: 1.17 is the oldest that runs");
  const auto entry = [&](unsigned place) -> void* {
    const unsigned since = place >= kFirstOf24 ? kPlacementSince : place >= kFirstOf22 ? kPluginsSince : 0;
    return api_ >= since ? const_cast<void*>(table[place]) : nullptr;
  };
#define EDGEKIT_FIND(name, place, ...) name = reinterpret_cast<decltype(name)>(entry(place));
  EDGEKIT_ORT_CALLS(EDGEKIT_FIND)
  EDGEKIT_ORT_PLAIN(EDGEKIT_FIND)
#undef EDGEKIT_FIND
}

void Ort::check(OrtStatus* status) const {
  if (status == nullptr) return;
  const std::string message = GetErrorMessage(status);
  ReleaseStatus(status);
  throw Refusal(message);
}

void* Ort::symbol(const char* name) const { return dlsym(library_, name); }

}  // namespace edgekit
