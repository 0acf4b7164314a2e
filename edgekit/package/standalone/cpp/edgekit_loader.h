// Opens the bundles of this package with ONNX Runtime, checks every file, and compares them with the float model.
//
//   edgekit::Ort ort("libonnxruntime.so");
//   const edgekit::Variant& variant = edgekit::Bundles().front();
//   edgekit::Session session = edgekit::OpenSession(ort, variant, "bundles/" + variant.name);
//   for (const std::string& failure : edgekit::RunSelfTest(ort, session, variant, folder)) ...
//
// Each function throws edgekit::Error with one line that says what is wrong.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "edgekit_golden.h"
#include "edgekit_ort.h"
#include "edgekit_sha256.h"
#include "edgekit_variant.h"

namespace edgekit {

namespace internal {

inline bool IsOlder(const std::string& version, const std::string& least) {
  int have[3] = {0, 0, 0}, need[3] = {0, 0, 0};
  std::sscanf(version.c_str(), "%d.%d.%d", &have[0], &have[1], &have[2]);
  std::sscanf(least.c_str(), "%d.%d.%d", &need[0], &need[1], &need[2]);
  return std::lexicographical_compare(have, have + 3, need, need + 3);
}

}  // namespace internal

struct OpenOptions {
  bool on_cpu = false;  // leave the provider out, and the key that forbids the CPU with it
  std::string plugin;   // the library of a provider that is loaded at run time
  std::string model;    // the file of one size of a bundle with several; the largest where it is empty
  bool tuned = true;    // tell the session what `edgekit tune` found for machines like this one
};

// Returns the settings that were found for machines like this one, nullptr where there are none.
inline const Tuned* FindTuned(const Variant& variant, const std::string& version) {
#if defined(__ANDROID__)
  const std::string system = "android";
#elif defined(__APPLE__)
  const std::string system = "darwin";
#else
  const std::string system = "linux";
#endif
#if defined(__aarch64__) && defined(__APPLE__)
  const std::string machine = "arm64";
#elif defined(__aarch64__)
  const std::string machine = "aarch64";
#elif defined(__x86_64__)
  const std::string machine = "x86_64";
#else
  const std::string machine = "";
#endif
  for (const Tuned& one : variant.tuned) {
    if (one.system != system || one.machine != machine) continue;
    if (one.cores != 0 && one.cores != std::thread::hardware_concurrency()) continue;
    // The level below all came with 1.23: half a setting is not what was measured.
    return one.level == 3 && internal::IsOlder(version, "1.23.0") ? nullptr : &one;
  }
  return nullptr;
}

inline void CheckFiles(const Variant& variant, const std::string& folder) {
  for (const File& file : variant.files) {
    const std::string digest = DigestFile(folder + "/" + file.name);
    if (digest.empty()) throw Error("'" + file.name + "' of bundle '" + variant.name + "' cannot be read");
    if (digest != file.sha256)
      throw Error("'" + file.name + "' of bundle '" + variant.name + "' was altered: its sha256 is another");
  }
}

namespace internal {

struct Options {
  explicit Options(const std::vector<std::pair<std::string, std::string>>& pairs) {
    for (const auto& [key, value] : pairs) {
      keys.push_back(key.c_str());
      values.push_back(value.c_str());
    }
  }
  std::vector<const char*> keys, values;
};

inline std::vector<const OrtEpDevice*> FindDevices(const Ort& ort, const std::string& provider) {
  const OrtEpDevice* const* devices = nullptr;
  std::size_t count = 0;
  ort.Do(Slot::kGetEpDevices, static_cast<const OrtEnv*>(ort.env()), &devices, &count);
  std::vector<const OrtEpDevice*> found;
  for (std::size_t i = 0; i < count; ++i)
    if (provider == ort.Call<const char*>(Slot::kEpDeviceEpName, devices[i])) found.push_back(devices[i]);
  return found;
}

using Pairs = std::vector<std::pair<std::string, std::string>>;

inline void AddPlugin(const Ort& ort, OrtSessionOptions* options, const std::string& provider,
                      const std::string& library, const Pairs& pairs) {
  if (FindDevices(ort, provider).empty()) {
    if (library.empty()) throw Error("give the library of " + provider);
    ort.Do(Slot::kRegisterExecutionProviderLibrary, ort.env(), provider.c_str(), library.c_str());
  }
  const std::vector<const OrtEpDevice*> devices = FindDevices(ort, provider);
  if (devices.empty()) throw Error("this machine has no device that " + provider + " can use");
  const Options given(pairs);
  ort.Do(Slot::kSessionOptionsAppendExecutionProviderV2, options, ort.env(), devices.data(), std::size_t{1},
         given.keys.data(), given.values.data(), given.keys.size());
}

// CUDA and TensorRT take their options in a struct of their own.
template <typename Given, Slot kCreate, Slot kUpdate, Slot kAppend, Slot kRelease>
void AddNvidia(const Ort& ort, OrtSessionOptions* options, const Pairs& pairs) {
  Owned<Given, kRelease> given(ort);
  ort.Do(kCreate, given.out());
  const Options words(pairs);
  ort.Do(kUpdate, given.get(), words.keys.data(), words.values.data(), words.keys.size());
  ort.Do(kAppend, options, static_cast<const Given*>(given.get()));
}

inline void AddProvider(const Ort& ort, OrtSessionOptions* options, const std::string& provider, const Pairs& pairs,
                        const std::string& plugin) {
  if (provider == "CPUExecutionProvider") return;
  if (provider == "QNNExecutionProvider" || provider == "OpenVINOExecutionProvider" ||
      provider == "WebGpuExecutionProvider")
    return AddPlugin(ort, options, provider, plugin, pairs);
  if (provider == "TensorrtExecutionProvider")
    return AddNvidia<OrtTensorRTProviderOptionsV2, Slot::kCreateTensorRTProviderOptions,
                     Slot::kUpdateTensorRTProviderOptions, Slot::kAppendTensorRT,
                     Slot::kReleaseTensorRTProviderOptions>(ort, options, pairs);
  if (provider == "CUDAExecutionProvider")
    return AddNvidia<OrtCUDAProviderOptionsV2, Slot::kCreateCUDAProviderOptions, Slot::kUpdateCUDAProviderOptions,
                     Slot::kAppendCUDA, Slot::kReleaseCUDAProviderOptions>(ort, options, pairs);
  const bool xnnpack = provider == "XnnpackExecutionProvider";
  if (!xnnpack && provider != "CoreMLExecutionProvider") throw Error("this loader does not know " + provider);
  if (xnnpack) ort.Do(Slot::kSetIntraOpNumThreads, options, 1);  // XNNPACK has its own threads
  const Options given(pairs);
  ort.Do(Slot::kSessionOptionsAppendExecutionProvider, options, xnnpack ? "XNNPACK" : "CoreML", given.keys.data(),
         given.values.data(), given.keys.size());
}

inline void Apply(const Ort& ort, OrtSessionOptions* options, const Tuned& tuned) {
  ort.Do(Slot::kSetSessionGraphOptimizationLevel, options, tuned.level);
  // Where no number was chosen, that which the provider wants stays.
  if (tuned.threads != 0) ort.Do(Slot::kSetIntraOpNumThreads, options, tuned.threads);
  ort.Do(Slot::kSetInterOpNumThreads, options, tuned.inter_threads);
  if (tuned.parallel) ort.Do(Slot::kSetSessionExecutionMode, options, 1);
  if (!tuned.arena) ort.Do(Slot::kDisableCpuMemArena, options);
  if (!tuned.memory_pattern) ort.Do(Slot::kDisableMemPattern, options);
}

}  // namespace internal

// Returns a session with every session key and provider option of the bundle, after checking its files.
inline Session OpenSession(const Ort& ort, const Variant& variant, const std::string& folder,
                           const OpenOptions& how = {}) {
  CheckFiles(variant, folder);
  if (internal::IsOlder(ort.version(), variant.minimum_ort))
    throw Error("'" + variant.name + "' needs ONNX Runtime " + variant.minimum_ort + ", this is " + ort.version());
  SessionOptions options(ort);
  ort.Do(Slot::kCreateSessionOptions, options.out());
  // Of other sizes nothing was found.
  const bool measured = how.tuned && !how.on_cpu && (how.model.empty() || how.model == variant.model);
  const Tuned* tuned = measured ? FindTuned(variant, ort.version()) : nullptr;
  for (const auto& [key, value] : tuned != nullptr ? tuned->session_config : variant.session_config)
    if (!how.on_cpu || key != "session.disable_cpu_ep_fallback")
      ort.Do(Slot::kAddSessionConfigEntry, options.get(), key.c_str(), value.c_str());
  if (!how.on_cpu) {
    internal::AddProvider(ort, options.get(), variant.provider,
                          tuned != nullptr ? tuned->provider_options : variant.provider_options, how.plugin);
    for (const Chained& behind : variant.chain)
      internal::AddProvider(ort, options.get(), behind.provider, behind.provider_options, how.plugin);
  }
  if (tuned != nullptr) internal::Apply(ort, options.get(), *tuned);
  Session session(ort);
  const std::string path = folder + "/" + (how.model.empty() ? variant.model : how.model);
  ort.Do(Slot::kCreateSession, static_cast<const OrtEnv*>(ort.env()), path.c_str(),
         static_cast<const OrtSessionOptions*>(options.get()), session.out());
  return session;
}

namespace internal {

inline double ReadHalf(std::uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double value = exponent == 31  ? (fraction != 0 ? NAN : INFINITY)
                       : exponent == 0 ? std::ldexp(fraction, -24)
                                       : std::ldexp(1024 + fraction, exponent - 25);
  return (bits & 0x8000) != 0 ? -value : value;
}

template <typename Number>
double Read(const char* at) {
  Number value;
  std::memcpy(&value, at, sizeof value);
  return static_cast<double>(value);
}

// Reads one element of a type whose distances mean something; wider integers and booleans are only compared.
inline double ReadNumber(const char* at, int dtype) {
  switch (dtype) {
    case 1: return Read<float>(at);
    case 2: return Read<std::uint8_t>(at);
    case 3: return Read<std::int8_t>(at);
    case 4: return Read<std::uint16_t>(at);
    case 5: return Read<std::int16_t>(at);
    case 10: {
      std::uint16_t bits;
      std::memcpy(&bits, at, sizeof bits);
      return ReadHalf(bits);
    }
    default: return Read<double>(at);
  }
}

inline bool IsNumeric(int dtype) { return (dtype >= 1 && dtype <= 5) || dtype == 10 || dtype == 11; }

struct Sums {
  double samples = 0, elements = 0, matches = 0, faulty = 0, dot = 0, wanted = 0, got = 0, error = 0, ranked = 0,
         agreed = 0;
};

inline void Add(Sums& sums, const Tensor& tensor, const char* wanted, const char* got) {
  const Dtype dtype = FindDtype(tensor.dtype);
  const std::size_t count = CountElements(tensor);
  sums.samples += 1;
  sums.elements += static_cast<double>(count);
  double best = -INFINITY, top = -INFINITY, top_wanted = -INFINITY;
  for (std::size_t i = 0; i < count; ++i) {
    const char *first = wanted + i * dtype.bytes, *second = got + i * dtype.bytes;
    sums.matches += std::memcmp(first, second, dtype.bytes) == 0;
    if (!IsNumeric(dtype.onnx)) continue;
    const double want = ReadNumber(first, dtype.onnx), have = ReadNumber(second, dtype.onnx);
    sums.faulty += !std::isfinite(want) || !std::isfinite(have);
    sums.dot += want * have;
    sums.wanted += want * want;
    sums.got += have * have;
    sums.error += (have - want) * (have - want);
    best = std::max(best, want);
    if (have > top) top = have, top_wanted = want;
  }
  const bool ranks = count > 1 && std::any_of(tensor.shape.begin(), tensor.shape.end(), [count](std::int64_t dim) {
                       return static_cast<std::size_t>(dim) == count;
                     });
  if (!ranks || !IsNumeric(dtype.onnx)) return;
  sums.ranked += 1;
  sums.agreed += top_wanted >= best;
}

inline double Decibels(double signal, double noise) {
  if (noise <= 0) return 200;
  return signal <= 0 ? -200 : std::clamp(10 * std::log10(signal / noise), -200.0, 200.0);
}

inline void Expect(std::vector<std::string>& failures, const Tensor& output, const char* what, double value,
                   double least) {
  if (value >= least) return;
  failures.push_back("output '" + output.name + "': " + what + " " + std::to_string(value) + ", least " +
                     std::to_string(least));
}

inline std::vector<std::string> Judge(const Variant& variant, const Tensor& output, const Sums& sums) {
  std::vector<std::string> failures;
  if (sums.elements == 0 || sums.faulty > 0)
    return {"output '" + output.name + "' has " + std::to_string(sums.faulty) + " values that are NaN or infinite"};
  if (!IsNumeric(FindDtype(output.dtype).onnx)) {
    Expect(failures, output, "exact match", sums.matches / sums.elements, variant.min_top1_agreement);
    return failures;
  }
  const double norm = std::sqrt(sums.wanted) * std::sqrt(sums.got);
  Expect(failures, output, "cosine", norm > 0 ? sums.dot / norm : (sums.wanted == sums.got ? 1 : 0),
         variant.min_cosine);
  Expect(failures, output, "SQNR in dB", Decibels(sums.wanted, sums.error), variant.min_sqnr_db);
  if (sums.ranked > 0)
    Expect(failures, output, "top-1 agreement", sums.agreed / sums.ranked,
           variant.min_top1_agreement - variant.granted_samples / sums.samples);
  return failures;
}

// Compares one sample with what this very model gave where it was built.
inline void Compare(std::vector<std::string>& failures, const Variant& variant, const Tensor& tensor,
                    const char* expected, const char* got) {
  const Dtype dtype = FindDtype(tensor.dtype);
  for (const auto& [name, limit] : variant.tolerance) {
    if (name != tensor.name || !IsNumeric(dtype.onnx)) continue;
    double distance = 0;
    for (std::size_t i = 0; i < CountElements(tensor); ++i) {
      const double should = ReadNumber(expected + i * dtype.bytes, dtype.onnx);
      distance = std::max(distance, std::abs(should - ReadNumber(got + i * dtype.bytes, dtype.onnx)));
    }
    if (!(distance <= limit))
      failures.push_back("output '" + tensor.name + "' is off by " + std::to_string(distance) + ", at most " +
                         std::to_string(limit));
  }
}

using MemoryInfo = Owned<OrtMemoryInfo, Slot::kReleaseMemoryInfo>;
using ShapeInfo = Owned<OrtTensorTypeAndShapeInfo, Slot::kReleaseTensorTypeAndShapeInfo>;

inline Value MakeTensor(const Ort& ort, const MemoryInfo& memory, const Tensor& tensor, const char* rows,
                        std::size_t index) {
  const Dtype dtype = FindDtype(tensor.dtype);
  const std::size_t bytes = CountElements(tensor) * dtype.bytes;
  Value value(ort);
  ort.Do(Slot::kCreateTensorWithDataAsOrtValue, static_cast<const OrtMemoryInfo*>(memory.get()),
         static_cast<void*>(const_cast<char*>(rows + index * bytes)), bytes, tensor.shape.data(), tensor.shape.size(),
         dtype.onnx, value.out());
  return value;
}

inline const char* ReadTensor(const Ort& ort, const Value& value, const Tensor& tensor) {
  ShapeInfo info(ort);
  int dtype = 0;
  std::size_t count = 0;
  void* data = nullptr;
  ort.Do(Slot::kGetTensorTypeAndShape, static_cast<const OrtValue*>(value.get()), info.out());
  ort.Do(Slot::kGetTensorElementType, static_cast<const OrtTensorTypeAndShapeInfo*>(info.get()), &dtype);
  ort.Do(Slot::kGetTensorShapeElementCount, static_cast<const OrtTensorTypeAndShapeInfo*>(info.get()), &count);
  if (dtype != FindDtype(tensor.dtype).onnx || count != CountElements(tensor))
    throw Error("output '" + tensor.name + "' has another type or size than the bundle says");
  ort.Do(Slot::kGetTensorMutableData, value.get(), &data);
  return static_cast<const char*>(data);
}

}  // namespace internal

// Runs the golden samples and returns every reason why the outputs do not reach the thresholds; none is a pass.
inline std::vector<std::string> RunSelfTest(const Ort& ort, const Session& session, const Variant& variant,
                                            const std::string& folder) {
  const bool whole = variant.judged_by_float;
  const std::string golden = folder + "/" + variant.golden, own = folder + "/golden/expected.npz";
  const Golden inputs(golden + "/inputs.npz"), wanted(whole ? golden + "/outputs.npz" : own);
  internal::MemoryInfo memory(ort);
  ort.Do(Slot::kCreateCpuMemoryInfo, 0, 0, memory.out());
  std::vector<const char*> input_names, output_names;
  for (const Tensor& tensor : variant.inputs) input_names.push_back(tensor.name.c_str());
  for (const Tensor& tensor : variant.outputs) output_names.push_back(tensor.name.c_str());
  std::vector<internal::Sums> sums(variant.outputs.size());
  std::vector<std::string> failures;
  const Golden expected(own);  // empty where nothing was chosen
  for (std::size_t index = 0; index < variant.samples; ++index) {
    const auto found = std::find(variant.chosen.begin(), variant.chosen.end(), index);
    const bool is_chosen = found != variant.chosen.end();
    if (!whole && !is_chosen) continue;  // a sample of another bundle's self-test
    const auto place = static_cast<std::size_t>(found - variant.chosen.begin());
    std::vector<Value> fed, got;
    std::vector<const OrtValue*> fed_handles;
    std::vector<OrtValue*> got_handles(variant.outputs.size(), nullptr);
    for (const Tensor& tensor : variant.inputs) {
      fed.push_back(internal::MakeTensor(ort, memory, tensor, inputs.Rows(tensor, variant.samples), index));
      fed_handles.push_back(fed.back().get());
    }
    ort.Do(Slot::kRun, session.get(), static_cast<const void*>(nullptr), input_names.data(), fed_handles.data(),
           fed_handles.size(), output_names.data(), output_names.size(), got_handles.data());
    for (OrtValue* handle : got_handles) {
      got.emplace_back(ort);
      *got.back().out() = handle;
    }
    for (std::size_t i = 0; i < got.size(); ++i) {
      const Tensor& tensor = variant.outputs[i];
      const std::size_t bytes = CountElements(tensor) * FindDtype(tensor.dtype).bytes;
      const char* row = wanted.Rows(tensor, CountSamples(variant)) + (whole ? index : place) * bytes;
      const char* data = internal::ReadTensor(ort, got[i], tensor);
      internal::Add(sums[i], tensor, row, data);
      if (!is_chosen) continue;
      internal::Compare(failures, variant, tensor, expected.Rows(tensor, variant.chosen.size()) + place * bytes, data);
    }
  }
  for (std::size_t i = 0; i < sums.size(); ++i)
    for (const std::string& line : internal::Judge(variant, variant.outputs[i], sums[i])) failures.push_back(line);
  return failures;
}

}  // namespace edgekit
