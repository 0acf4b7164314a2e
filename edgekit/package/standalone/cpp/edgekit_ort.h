// The few functions of ONNX Runtime's C API that the loader calls, found in a library that is opened at run time.
//
// The API is a table of function pointers to which releases only append, so a function's place in it never changes.
// That is why neither headers nor a link to the library are needed. Handles have the names they have in
// onnxruntime_c_api.h, so that both can be included and Ort::Session takes what OpenSession returns.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

struct OrtAllocator;
struct OrtCUDAProviderOptionsV2;
struct OrtEnv;
struct OrtEpDevice;
struct OrtIoBinding;
struct OrtMemoryInfo;
struct OrtSession;
struct OrtSessionOptions;
struct OrtStatus;
struct OrtTensorRTProviderOptionsV2;
struct OrtTensorTypeAndShapeInfo;
struct OrtValue;

namespace edgekit {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Places in the table OrtApi; all but the last three are those of its first versions.
enum class Slot : std::size_t {
  kGetErrorMessage = 2,
  kCreateEnv = 3,
  kCreateSession = 7,
  kRun = 9,
  kCreateSessionOptions = 10,
  kSetSessionExecutionMode = 13,
  kDisableMemPattern = 17,
  kDisableCpuMemArena = 19,
  kSetSessionGraphOptimizationLevel = 23,
  kSetIntraOpNumThreads = 24,
  kSetInterOpNumThreads = 25,
  kCreateTensorWithDataAsOrtValue = 49,
  kGetTensorMutableData = 51,
  kGetTensorElementType = 60,
  kGetDimensionsCount = 61,
  kGetDimensions = 62,
  kGetTensorShapeElementCount = 64,
  kGetTensorTypeAndShape = 65,
  kCreateCpuMemoryInfo = 69,
  kAllocatorFree = 76,
  kGetAllocatorWithDefaultOptions = 78,
  kReleaseEnv = 92,
  kReleaseStatus = 93,
  kReleaseMemoryInfo = 94,
  kReleaseSession = 95,
  kReleaseValue = 96,
  kReleaseTensorTypeAndShapeInfo = 99,
  kReleaseSessionOptions = 100,
  kAddSessionConfigEntry = 130,
  kRunWithBinding = 133,
  kCreateIoBinding = 134,
  kReleaseIoBinding = 135,
  kBindInput = 136,
  kBindOutput = 137,
  kBindOutputToDevice = 138,
  kGetBoundOutputValues = 140,
  kAppendTensorRT = 170,
  kCreateTensorRTProviderOptions = 171,
  kUpdateTensorRTProviderOptions = 172,
  kReleaseTensorRTProviderOptions = 174,
  kAppendCUDA = 204,
  kCreateCUDAProviderOptions = 205,
  kUpdateCUDAProviderOptions = 206,
  kReleaseCUDAProviderOptions = 208,
  kSessionOptionsAppendExecutionProvider = 216,
  kRegisterExecutionProviderLibrary = 301,
  kGetEpDevices = 303,
  kSessionOptionsAppendExecutionProviderV2 = 304,
  kEpDeviceEpName = 312,
};

// The API version that has every slot above: ONNX Runtime 1.22.
constexpr std::uint32_t kApiVersion = 22;

class Ort {
 public:
  explicit Ort(const std::string& library) : handle_(dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    if (handle_ == nullptr) throw Error("cannot load '" + library + "': " + Text(dlerror()));
    using GetBase = const Base* (*)();
    const auto get_base = reinterpret_cast<GetBase>(dlsym(handle_, "OrtGetApiBase"));
    if (get_base == nullptr) throw Error("'" + library + "' is no ONNX Runtime");
    version_ = get_base()->get_version();
    table_ = get_base()->get_api(kApiVersion);
    if (table_ == nullptr) throw Error("ONNX Runtime " + version_ + " is too old: 1.22 or newer is needed");
    Check(Call<OrtStatus*>(Slot::kCreateEnv, 3, "edgekit", &env_));
  }
  Ort(const Ort&) = delete;
  Ort& operator=(const Ort&) = delete;
  ~Ort() {  // the library stays loaded: its threads may outlive this object
    if (env_ != nullptr) Call<void>(Slot::kReleaseEnv, env_);
  }

  // Calls the function in a slot; the arguments must have exactly the types of the C API.
  template <typename Result, typename... Arguments>
  Result Call(Slot slot, Arguments... arguments) const {
    using Function = Result (*)(Arguments...);
    return reinterpret_cast<Function>(table_[static_cast<std::size_t>(slot)])(arguments...);
  }

  // Calls a function that returns a status, and throws Error with ONNX Runtime's message if it is not null.
  template <typename... Arguments>
  void Do(Slot slot, Arguments... arguments) const {
    Check(Call<OrtStatus*>(slot, arguments...));
  }

  OrtEnv* env() const { return env_; }
  const std::string& version() const { return version_; }

 private:
  struct Base {
    void* const* (*get_api)(std::uint32_t version);
    const char* (*get_version)();
  };

  static std::string Text(const char* text) { return text == nullptr ? "" : text; }

  void Check(OrtStatus* status) const {
    if (status == nullptr) return;
    const std::string message = Text(Call<const char*>(Slot::kGetErrorMessage, static_cast<const OrtStatus*>(status)));
    Call<void>(Slot::kReleaseStatus, status);
    throw Error(message);
  }

  void* handle_ = nullptr;
  void* const* table_ = nullptr;
  OrtEnv* env_ = nullptr;
  std::string version_;
};

// An object of the C API that is released with it.
template <typename Object, Slot kRelease>
class Owned {
 public:
  explicit Owned(const Ort& ort) : ort_(&ort) {}
  Owned(Owned&& other) noexcept : ort_(other.ort_), object_(std::exchange(other.object_, nullptr)) {}
  Owned& operator=(Owned&&) = delete;
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() {
    if (object_ != nullptr) ort_->Call<void>(kRelease, object_);
  }

  Object* get() const { return object_; }
  Object** out() { return &object_; }
  Object* release() { return std::exchange(object_, nullptr); }

 private:
  const Ort* ort_;
  Object* object_ = nullptr;
};

using Session = Owned<OrtSession, Slot::kReleaseSession>;
using SessionOptions = Owned<OrtSessionOptions, Slot::kReleaseSessionOptions>;
using Value = Owned<OrtValue, Slot::kReleaseValue>;

}  // namespace edgekit
