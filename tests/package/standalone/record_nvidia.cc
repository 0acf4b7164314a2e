// The ONNX Runtime that REAL_ORT names, in which the functions for CUDA and TensorRT, that a build without a GPU refuses,
// take everything and write down what they were given.
#include <dlfcn.h>
#include <onnxruntime_c_api.h>

#include <cstdio>
#include <cstdlib>

namespace {

const OrtApiBase* FindReal() {
  void* real = dlopen(std::getenv("REAL_ORT"), RTLD_NOW | RTLD_LOCAL);
  return reinterpret_cast<const OrtApiBase* (*)()>(dlsym(real, "OrtGetApiBase"))();
}

template <typename Options>
OrtStatus* Create(Options** out) noexcept {
  *out = reinterpret_cast<Options*>(new char);
  return nullptr;
}

template <typename Options>
OrtStatus* Update(Options*, const char* const* keys, const char* const* values, size_t count) noexcept {
  for (size_t i = 0; i < count; ++i) std::printf("option %s=%s\n", keys[i], values[i]);
  return nullptr;
}

OrtStatus* AppendCuda(OrtSessionOptions*, const OrtCUDAProviderOptionsV2*) noexcept {
  std::puts("then CUDA");
  return nullptr;
}

OrtStatus* AppendTensorRT(OrtSessionOptions*, const OrtTensorRTProviderOptionsV2*) noexcept {
  std::puts("then TensorRT");
  return nullptr;
}

template <typename Options>
void Release(Options* options) noexcept {
  delete reinterpret_cast<char*>(options);
}

const OrtApi* GetApi(uint32_t version) noexcept {
  static OrtApi api = *FindReal()->GetApi(version);
  api.CreateCUDAProviderOptions = Create;
  api.UpdateCUDAProviderOptions = Update;
  api.ReleaseCUDAProviderOptions = Release;
  api.SessionOptionsAppendExecutionProvider_CUDA_V2 = AppendCuda;
  api.CreateTensorRTProviderOptions = Create;
  api.UpdateTensorRTProviderOptions = Update;
  api.ReleaseTensorRTProviderOptions = Release;
  api.SessionOptionsAppendExecutionProvider_TensorRT_V2 = AppendTensorRT;
  return &api;
}

const char* GetVersion() noexcept { return FindReal()->GetVersionString(); }

}  // namespace

extern "C" const OrtApiBase* OrtGetApiBase() noexcept {
  static const OrtApiBase base = {GetApi, GetVersion};
  return &base;
}
