// The part of ONNX Runtime's C interface that the runner uses, found in a library at run time.
//
// The interface is a table of functions whose order never changes; a function stands here with its place in that
// table. So one binary fits every ONNX Runtime, and building it needs no header of any version.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

struct OrtEnv;
struct OrtStatus;
struct OrtMemoryInfo;
struct OrtSession;
struct OrtValue;
struct OrtRunOptions;
struct OrtTypeInfo;
struct OrtTensorTypeAndShapeInfo;
struct OrtSessionOptions;
struct OrtAllocator;
struct OrtEpDevice;
struct OrtEpAssignedSubgraph;
struct OrtEpAssignedNode;

// X(name, place, parameters): functions that return a status, null for success.
#define EDGEKIT_ORT_CALLS(X)                                                                                        \
  X(CreateEnv, 3, (std::int32_t level, const char* id, OrtEnv** out))                                               \
  X(CreateSession, 7, (const OrtEnv*, const char* path, const OrtSessionOptions*, OrtSession** out))                \
  X(Run, 9,                                                                                                        \
    (OrtSession*, const OrtRunOptions*, const char* const* input_names, const OrtValue* const* inputs,              \
     std::size_t input_count, const char* const* output_names, std::size_t output_count, OrtValue** outputs))       \
  X(CreateSessionOptions, 10, (OrtSessionOptions * *out))                                                           \
  X(SetSessionExecutionMode, 13, (OrtSessionOptions*, std::int32_t mode))                                           \
  X(EnableProfiling, 14, (OrtSessionOptions*, const char* prefix))                                                  \
  X(DisableMemPattern, 17, (OrtSessionOptions*))                                                                    \
  X(DisableCpuMemArena, 19, (OrtSessionOptions*))                                                                   \
  X(SetSessionLogSeverityLevel, 22, (OrtSessionOptions*, int level))                                                \
  X(SetSessionGraphOptimizationLevel, 23, (OrtSessionOptions*, std::int32_t level))                                 \
  X(SetIntraOpNumThreads, 24, (OrtSessionOptions*, int threads))                                                    \
  X(SetInterOpNumThreads, 25, (OrtSessionOptions*, int threads))                                                    \
  X(SessionGetInputCount, 30, (const OrtSession*, std::size_t* out))                                                \
  X(SessionGetOutputCount, 31, (const OrtSession*, std::size_t* out))                                               \
  X(SessionGetInputName, 36, (const OrtSession*, std::size_t index, OrtAllocator*, char** out))                     \
  X(SessionGetOutputName, 37, (const OrtSession*, std::size_t index, OrtAllocator*, char** out))                    \
  X(CreateTensorAsOrtValue, 48,                                                                                     \
    (OrtAllocator*, const std::int64_t* shape, std::size_t rank, std::int32_t type, OrtValue** out))                \
  X(CreateTensorWithDataAsOrtValue, 49,                                                                             \
    (const OrtMemoryInfo*, void* data, std::size_t size, const std::int64_t* shape, std::size_t rank,               \
     std::int32_t type, OrtValue** out))                                                                            \
  X(GetTensorMutableData, 51, (OrtValue*, void** out))                                                              \
  X(GetTensorElementType, 60, (const OrtTensorTypeAndShapeInfo*, std::int32_t* out))                                \
  X(GetDimensionsCount, 61, (const OrtTensorTypeAndShapeInfo*, std::size_t* out))                                   \
  X(GetDimensions, 62, (const OrtTensorTypeAndShapeInfo*, std::int64_t* out, std::size_t rank))                     \
  X(GetTensorTypeAndShape, 65, (const OrtValue*, OrtTensorTypeAndShapeInfo** out))                                  \
  X(GetValueType, 67, (const OrtValue*, std::int32_t* out))                                                         \
  X(CreateCpuMemoryInfo, 69, (std::int32_t allocator, std::int32_t memory, OrtMemoryInfo** out))                    \
  X(AllocatorFree, 76, (OrtAllocator*, void*))                                                                      \
  X(GetAllocatorWithDefaultOptions, 78, (OrtAllocator * *out))                                                      \
  X(GetValue, 80, (const OrtValue*, int index, OrtAllocator*, OrtValue** out))                                      \
  X(GetValueCount, 81, (const OrtValue*, std::size_t* out))                                                         \
  X(SessionEndProfiling, 110, (OrtSession*, OrtAllocator*, char** out))                                             \
  X(GetStringTensorElementLength, 127, (const OrtValue*, std::size_t index, std::size_t* out))                      \
  X(GetStringTensorElement, 128, (const OrtValue*, std::size_t size, std::size_t index, void* out))                 \
  X(AddSessionConfigEntry, 130, (OrtSessionOptions*, const char* key, const char* value))                           \
  X(HasValue, 192, (const OrtValue*, int* out))                                                                     \
  X(SessionOptionsAppendExecutionProvider, 216,                                                                     \
    (OrtSessionOptions*, const char* name, const char* const* keys, const char* const* values, std::size_t count))  \
  X(GetResizedStringTensorElementBuffer, 252, (OrtValue*, std::size_t index, std::size_t size, char** out))         \
  X(RegisterExecutionProviderLibrary, 301, (OrtEnv*, const char* name, const char* path))                           \
  X(GetEpDevices, 303, (const OrtEnv*, const OrtEpDevice* const** out, std::size_t* count))                         \
  X(SessionOptionsAppendExecutionProvider_V2, 304,                                                                  \
    (OrtSessionOptions*, OrtEnv*, const OrtEpDevice* const* devices, std::size_t device_count,                      \
     const char* const* keys, const char* const* values, std::size_t count))                                        \
  X(Session_GetEpGraphAssignmentInfo, 407,                                                                          \
    (const OrtSession*, const OrtEpAssignedSubgraph* const** out, std::size_t* count))                              \
  X(EpAssignedSubgraph_GetEpName, 408, (const OrtEpAssignedSubgraph*, const char** out))                            \
  X(EpAssignedSubgraph_GetNodes, 409,                                                                               \
    (const OrtEpAssignedSubgraph*, const OrtEpAssignedNode* const** out, std::size_t* count))                       \
  X(EpAssignedNode_GetName, 410, (const OrtEpAssignedNode*, const char** out))                                      \
  X(EpAssignedNode_GetDomain, 411, (const OrtEpAssignedNode*, const char** out))                                    \
  X(EpAssignedNode_GetOperatorType, 412, (const OrtEpAssignedNode*, const char** out))

// X(name, place, parameters, result): functions that cannot fail.
#define EDGEKIT_ORT_PLAIN(X)                                        \
  X(GetErrorMessage, 2, (const OrtStatus*), const char*)            \
  X(ReleaseEnv, 92, (OrtEnv*), void)                                \
  X(ReleaseStatus, 93, (OrtStatus*), void)                          \
  X(ReleaseMemoryInfo, 94, (OrtMemoryInfo*), void)                  \
  X(ReleaseSession, 95, (OrtSession*), void)                        \
  X(ReleaseValue, 96, (OrtValue*), void)                            \
  X(ReleaseTensorTypeAndShapeInfo, 99, (OrtTensorTypeAndShapeInfo*), void) \
  X(ReleaseSessionOptions, 100, (OrtSessionOptions*), void)         \
  X(EpDevice_EpName, 312, (const OrtEpDevice*), const char*)

namespace edgekit {

constexpr unsigned kPluginsSince = 22;    // provider libraries
constexpr unsigned kPlacementSince = 24;  // what a session gave to which provider

class Ort {
 public:
  // Opens the library at a path, or, where that is empty, the one beside the program or on the system's search path.
  // Throws Failure: there is none, or it is older than version 1.17.
  explicit Ort(const std::string& path);

#define EDGEKIT_DECLARE(name, place, parameters) OrtStatus*(*name) parameters = nullptr;
  EDGEKIT_ORT_CALLS(EDGEKIT_DECLARE)
#undef EDGEKIT_DECLARE
#define EDGEKIT_DECLARE(name, place, parameters, result) result(*name) parameters = nullptr;
  EDGEKIT_ORT_PLAIN(EDGEKIT_DECLARE)
#undef EDGEKIT_DECLARE

  const std::string& version() const { return version_; }
  unsigned api() const { return api_; }

  // Throws Refusal with the message of a status that is not null.
  void check(OrtStatus* status) const;

  // Returns a function that the library exports by name, or null.
  void* symbol(const char* name) const;

 private:
  void* library_ = nullptr;
  unsigned api_ = 0;
  std::string version_;
};

template <typename T>
using Owned = std::unique_ptr<T, void (*)(T*)>;

}  // namespace edgekit
