#include "session.h"

#include <atomic>
#include <cstring>
#include <ctime>
#include <exception>
#include <thread>

#include "failure.h"

namespace edgekit {
namespace {

constexpr const char* kNnapi = "NnapiExecutionProvider";
constexpr std::int64_t kMaxThreads = 1024;
constexpr std::int32_t kTensorType = 1, kSequenceType = 2, kMapType = 3;
constexpr std::int32_t kSequential = 0, kParallel = 1;
constexpr std::int32_t kArenaAllocator = 1;
constexpr std::int32_t kDefaultMemory = 0;

struct Level {
  const char* name;
  std::int32_t number;
};
constexpr Level kLevels[] = {{"disabled", 0}, {"basic", 1}, {"extended", 2}, {"layout", 3}, {"all", 99}};

// The names that ONNX Runtime's generic function knows, where they are not the provider's own without its ending.
constexpr const char* kShortNames[][2] = {{"XnnpackExecutionProvider", "XNNPACK"}, {"WebGpuExecutionProvider", "WebGPU"}};

struct Flag {
  const char* name;
  std::uint32_t bit;
};
constexpr Flag kNnapiFlags[] = {
    {"NNAPI_FLAG_USE_FP16", 1}, {"NNAPI_FLAG_USE_NCHW", 2}, {"NNAPI_FLAG_CPU_DISABLED", 4}, {"NNAPI_FLAG_CPU_ONLY", 8}};

std::int32_t level_number(const std::string& name) {
  for (const Level& level : kLevels) {
    if (name == level.name) return level.number;
  }
  throw Failure(quoted(name) + " is no optimization level: disabled, basic, extended, layout or all");
}

std::string short_name(const std::string& provider) {
  for (const auto& pair : kShortNames) {
    if (provider == pair[0]) return pair[1];
  }
  const std::size_t ending = provider.rfind("ExecutionProvider");
  return ending == std::string::npos ? provider : provider.substr(0, ending);
}

struct Pairs {
  explicit Pairs(const Words& words) {
    for (const auto& [key, value] : words) {
      keys.push_back(key.c_str());
      values.push_back(value.c_str());
    }
  }
  std::vector<const char*> keys;
  std::vector<const char*> values;
};

int read_threads(const Json& json, const char* name) {
  const std::int64_t threads = json.whole_of(name, 0);
  if (threads > kMaxThreads) throw Failure(quoted(name) + " is larger than 1024");
  return static_cast<int>(threads);
}

template <typename T, typename Create>
Owned<T> make(const Ort& ort, void (*release)(T*), Create create) {
  T* made = nullptr;
  ort.check(create(&made));
  return Owned<T>(made, release);
}

// Keys and values of each map, as `Session::flatten` has them.
bool have_equal_keys(const std::vector<std::vector<View>>& maps) {
  for (const std::vector<View>& map : maps) {
    const View &keys = map[0], &first = maps[0][0];
    if (keys.dtype != first.dtype || keys.shape != first.shape || keys.words != first.words) return false;
    if (keys.size > 0 && std::memcmp(keys.data, first.data, keys.size) != 0) return false;
    if (map[1].dtype != maps[0][1].dtype || map[1].dtype->size == 0) return false;
  }
  return true;
}

// Returns the keys that maps share, and a row of values for each: so ZipMap gives the probabilities of classes.
std::vector<View> join_rows(const std::string& name, std::vector<std::vector<View>>& maps) {
  std::vector<View> seen(maps[0].begin(), maps[0].begin() + 2);
  const auto rows = std::make_shared<std::string>();
  for (const std::vector<View>& map : maps) rows->append(map[1].data, map[1].size);
  seen[0].name = name + ".keys";
  seen[1].name = name + ".values";
  seen[1].shape.insert(seen[1].shape.begin(), static_cast<std::int64_t>(maps.size()));
  seen[1].data = rows->data();
  seen[1].size = rows->size();
  seen[1].holds = rows;
  return seen;
}

}  // namespace

double now_ms() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_nsec) / 1e6;
}

Job read_job(const Json& json) {
  if (json.kind != Json::Kind::object) throw Failure("the job is no object");
  Job job;
  job.model = json.text_of("model");
  if (job.model.empty()) throw Failure("the job names no model");
  job.provider = json.text_of("provider", kCpu);
  job.library = json.text_of("library");
  job.provider_options = json.words_of("provider_options");
  job.session_config = json.words_of("session_config");
  job.level = json.text_of("level", "all");
  job.threads = read_threads(json, "threads");
  job.inter_threads = read_threads(json, "inter_threads");
  job.parallel = json.truth_of("parallel", false);
  job.arena = json.truth_of("arena", true);
  job.memory_pattern = json.truth_of("memory_pattern", true);
  job.least_samples = json.whole_of("least_samples", job.least_samples);
  job.budget_s = json.number_of("budget_s", job.budget_s);
  job.profile = json.truth_of("profile", false);
  job.runtime = json.text_of("runtime");
  job.repeat = json.whole_of("repeat", 1);
  if (job.repeat < 1) throw Failure("'repeat' is less than 1");
  const std::int64_t concurrency = json.whole_of("concurrency", 1);
  if (concurrency < 1 || concurrency > kMaxThreads) throw Failure("'concurrency' is not from 1 to 1024");
  job.concurrency = static_cast<int>(concurrency);
  job.io_binding = json.truth_of("io_binding", false);
  job.trace = json.truth_of("trace", false);
  return job;
}

Session::Session(const Ort& ort, const Job& job)
    : ort_(ort),
      env_(make<OrtEnv>(ort, ort.ReleaseEnv, [&](OrtEnv** out) { return ort.CreateEnv(3, "edgekit", out); })),
      memory_(make<OrtMemoryInfo>(
          ort, ort.ReleaseMemoryInfo,
          [&](OrtMemoryInfo** out) { return ort.CreateCpuMemoryInfo(kArenaAllocator, kDefaultMemory, out); })),
      options_(make<OrtSessionOptions>(
          ort, ort.ReleaseSessionOptions, [&](OrtSessionOptions** out) { return ort.CreateSessionOptions(out); })),
      session_(nullptr, ort.ReleaseSession),
      trace_(job.trace),
      io_binding_(job.io_binding) {
  ort_.check(ort_.GetAllocatorWithDefaultOptions(&allocator_));
  ort_.check(ort_.SetSessionGraphOptimizationLevel(options_.get(), level_number(job.level)));
  ort_.check(ort_.SetIntraOpNumThreads(options_.get(), job.threads));
  ort_.check(ort_.SetInterOpNumThreads(options_.get(), job.inter_threads));
  ort_.check(ort_.SetSessionExecutionMode(options_.get(), job.parallel ? kParallel : kSequential));
  if (!job.arena) ort_.check(ort_.DisableCpuMemArena(options_.get()));
  if (!job.memory_pattern) ort_.check(ort_.DisableMemPattern(options_.get()));
  ort_.check(ort_.SetSessionLogSeverityLevel(options_.get(), 3));
  for (const auto& [key, value] : job.session_config) {
    ort_.check(ort_.AddSessionConfigEntry(options_.get(), key.c_str(), value.c_str()));
  }
  if (job.profile || job.trace) watch_profile();
  if (!job.profile && ort_.api() >= kPlacementSince) {
    ort_.check(ort_.AddSessionConfigEntry(options_.get(), "session.record_ep_graph_assignment_info", "1"));
  }
  const double start = now_ms();
  try {
    open(job);
  } catch (...) {
    hide_profile();
    throw;
  }
  load_ms_ = now_ms() - start;
  hide_profile();
  inputs_ = names(true);
  outputs_ = names(false);
}

void Session::open(const Job& job) {
  if (!job.library.empty()) {
    append_library(job);
  } else if (job.provider != kCpu) {
    append_provider(job);
  }
  session_ = make<OrtSession>(ort_, ort_.ReleaseSession, [&](OrtSession** out) {
    return ort_.CreateSession(env_.get(), job.model.c_str(), options_.get(), out);
  });
}

void Session::append_provider(const Job& job) {
  if (job.provider == kNnapi) return append_nnapi(job.provider_options);
  const Pairs pairs(job.provider_options);
  ort_.check(ort_.SessionOptionsAppendExecutionProvider(options_.get(), short_name(job.provider).c_str(),
                                                        pairs.keys.data(), pairs.values.data(), pairs.keys.size()));
}

void Session::append_nnapi(const Words& options) {
  using Append = OrtStatus* (*)(OrtSessionOptions*, std::uint32_t);
  std::uint32_t flags = 0;
  for (const auto& [key, value] : options) {
    std::uint32_t bit = 0;
    for (const Flag& flag : kNnapiFlags) bit |= key == flag.name ? flag.bit : 0U;
    if (bit == 0 || (value != "0" && value != "1")) throw Failure(quoted(key) + " is no flag of NNAPI with 0 or 1");
    flags |= value == "1" ? bit : 0U;
  }
  const auto append = reinterpret_cast<Append>(ort_.symbol("OrtSessionOptionsAppendExecutionProvider_Nnapi"));
  if (append == nullptr) throw Refusal("this ONNX Runtime was built without NNAPI");
  ort_.check(append(options_.get(), flags));
}

void Session::append_library(const Job& job) {
  if (ort_.api() < kPluginsSince) throw Refusal("ONNX Runtime " + ort_.version() + " takes no provider libraries");
  ort_.check(ort_.RegisterExecutionProviderLibrary(env_.get(), job.provider.c_str(), job.library.c_str()));
  const OrtEpDevice* const* devices = nullptr;
  std::size_t count = 0;
  ort_.check(ort_.GetEpDevices(env_.get(), &devices, &count));
  const Pairs pairs(job.provider_options);
  for (std::size_t index = 0; index < count; ++index) {
    if (job.provider == ort_.EpDevice_EpName(devices[index])) {
      ort_.check(ort_.SessionOptionsAppendExecutionProvider_V2(options_.get(), env_.get(), devices + index, 1,
                                                               pairs.keys.data(), pairs.values.data(),
                                                               pairs.keys.size()));
      return;
    }
  }
  throw Refusal(quoted(job.library) + " offers no device of " + quoted(job.provider));
}

std::vector<std::string> Session::names(bool of_inputs) const {
  std::size_t count = 0;
  ort_.check(of_inputs ? ort_.SessionGetInputCount(session_.get(), &count)
                       : ort_.SessionGetOutputCount(session_.get(), &count));
  std::vector<std::string> found;
  for (std::size_t index = 0; index < count; ++index) {
    char* name = nullptr;
    ort_.check(of_inputs ? ort_.SessionGetInputName(session_.get(), index, allocator_, &name)
                         : ort_.SessionGetOutputName(session_.get(), index, allocator_, &name));
    found.emplace_back(name);
    ort_.check(ort_.AllocatorFree(allocator_, name));
  }
  return found;
}

void Session::bind(std::vector<Tensor>& tensors) {
  // Outputs of another sample may have other shapes.
  given_.clear();
  values_.clear();
  fed_names_.clear();
  fed_.clear();
  for (Tensor& tensor : tensors) {
    OrtValue* made = nullptr;
    if (tensor.dtype->onnx == kString) {
      ort_.check(ort_.CreateTensorAsOrtValue(allocator_, tensor.shape.data(), tensor.shape.size(), kString, &made));
      values_.emplace_back(made, ort_.ReleaseValue);
      for (std::size_t index = 0; index < tensor.words.size(); ++index) {
        const std::string& word = tensor.words[index];
        char* room = nullptr;
        ort_.check(ort_.GetResizedStringTensorElementBuffer(made, index, word.size(), &room));
        if (!word.empty()) std::memcpy(room, word.data(), word.size());
      }
    } else {
      if (tensor.bytes.data() == nullptr) tensor.bytes.resize(0);
      ort_.check(ort_.CreateTensorWithDataAsOrtValue(memory_.get(), tensor.bytes.data(), tensor.bytes.size(),
                                                     tensor.shape.data(), tensor.shape.size(), tensor.dtype->onnx,
                                                     &made));
      values_.emplace_back(made, ort_.ReleaseValue);
    }
    fed_names_.push_back(tensor.name.c_str());
    fed_.push_back(made);
  }
}

double Session::run() { return run_into(given_); }

double Session::run_together(std::int64_t count, int concurrency, std::vector<double>& times) {
  std::atomic<std::int64_t> left(count);
  std::vector<Values> given(static_cast<std::size_t>(concurrency));
  std::vector<std::vector<double>> spent(given.size());
  std::vector<std::exception_ptr> failures(given.size());
  const double start = now_ms();
  std::vector<std::thread> threads;
  for (std::size_t index = 0; index < given.size(); ++index) {
    threads.emplace_back([&, index] {
      try {
        while (left.fetch_sub(1) > 0) spent[index].push_back(run_into(given[index]));
      } catch (...) {
        failures[index] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const double all = now_ms() - start;
  for (const std::exception_ptr& failure : failures) {
    if (failure != nullptr) std::rethrow_exception(failure);
  }
  for (std::size_t index = 0; index < given.size(); ++index) {
    times.insert(times.end(), spent[index].begin(), spent[index].end());
    // A thread that came late found nothing left to do.
    if (!given[index].empty()) given_ = std::move(given[index]);
  }
  return all;
}

double Session::run_into(Values& given) const {
  std::vector<const char*> wanted;
  for (const std::string& name : outputs_) wanted.push_back(name.c_str());
  if (!io_binding_) given.clear();
  const bool is_bound = !given.empty();
  std::vector<OrtValue*> results(outputs_.size(), nullptr);
  for (std::size_t index = 0; is_bound && index < given.size(); ++index) results[index] = given[index].get();
  const double start = now_ms();
  OrtStatus* status = ort_.Run(session_.get(), nullptr, fed_names_.data(), fed_.data(), fed_.size(), wanted.data(),
                               wanted.size(), results.data());
  const double spent = now_ms() - start;
  if (!is_bound) {
    for (OrtValue* value : results) given.emplace_back(value, ort_.ReleaseValue);
  }
  ort_.check(status);
  return spent;
}

std::vector<View> Session::views() const {
  std::vector<View> seen;
  for (std::size_t index = 0; index < given_.size(); ++index) {
    for (View& each : flatten(outputs_[index], given_[index].get())) seen.push_back(std::move(each));
  }
  return seen;
}

// Returns maps and sequences as tensors, with the names that `flatten_value` of edgekit/model/tensors.py gives them.
std::vector<View> Session::flatten(const std::string& name, OrtValue* value) const {
  std::int32_t kind = 0;
  int has_value = 0;
  if (value != nullptr) {
    ort_.check(ort_.GetValueType(value, &kind));
    ort_.check(ort_.HasValue(value, &has_value));
  }
  if (has_value == 0 || (kind != kTensorType && kind != kSequenceType && kind != kMapType)) {
    throw Refusal("output " + quoted(name) + " is no tensor: remove it from the outputs");
  }
  std::vector<View> seen;
  if (kind == kTensorType) {
    seen.push_back(view(name, value));
    return seen;
  }
  std::size_t count = 0;
  ort_.check(ort_.GetValueCount(value, &count));
  std::vector<std::vector<View>> parts;
  bool are_maps = kind == kSequenceType && count > 0;
  for (std::size_t index = 0; index < count; ++index) {
    OrtValue* part = nullptr;
    ort_.check(ort_.GetValue(value, static_cast<int>(index), allocator_, &part));
    const std::shared_ptr<OrtValue> owned(part, ort_.ReleaseValue);
    const std::string suffix = kind == kMapType ? (index == 0 ? ".keys" : ".values") : "[" + std::to_string(index) + "]";
    std::int32_t kind_of_part = 0;
    ort_.check(ort_.GetValueType(part, &kind_of_part));
    are_maps = are_maps && kind_of_part == kMapType;
    parts.push_back(flatten(name + suffix, part));
    for (View& each : parts.back()) {
      if (each.holds == nullptr) each.holds = owned;
    }
  }
  if (are_maps && have_equal_keys(parts)) return join_rows(name, parts);
  if (kind == kSequenceType) {
    const auto length = std::make_shared<std::int64_t>(count);
    const Dtype* dtype = find_dtype("int64");
    seen.push_back({name + ".length", dtype, {}, reinterpret_cast<const char*>(length.get()), dtype->size, {}, length});
  }
  for (std::vector<View>& part : parts) {
    for (View& each : part) seen.push_back(std::move(each));
  }
  return seen;
}

View Session::view(const std::string& name, OrtValue* value) const {
  const auto info = make<OrtTensorTypeAndShapeInfo>(
      ort_, ort_.ReleaseTensorTypeAndShapeInfo,
      [&](OrtTensorTypeAndShapeInfo** out) { return ort_.GetTensorTypeAndShape(value, out); });
  std::int32_t type = 0;
  std::size_t rank = 0;
  ort_.check(ort_.GetTensorElementType(info.get(), &type));
  ort_.check(ort_.GetDimensionsCount(info.get(), &rank));
  View seen{name, find_dtype(type), std::vector<std::int64_t>(rank), nullptr, 0, {}, nullptr};
  if (seen.dtype == nullptr) {
    throw Refusal("output " + quoted(name) + " has ONNX element type " + std::to_string(type) + ", which is not carried");
  }
  ort_.check(ort_.GetDimensions(info.get(), seen.shape.data(), rank));
  const auto count = static_cast<std::size_t>(count_elements(seen.shape, name));
  if (type != kString) {
    void* data = nullptr;
    ort_.check(ort_.GetTensorMutableData(value, &data));
    seen.data = static_cast<const char*>(data);
    seen.size = count * seen.dtype->size;
    return seen;
  }
  for (std::size_t index = 0; index < count; ++index) {
    std::size_t length = 0;
    ort_.check(ort_.GetStringTensorElementLength(value, index, &length));
    std::string word(length, '\0');
    ort_.check(ort_.GetStringTensorElement(value, length, index, word.data()));
    if (!is_utf8(word)) throw Refusal("output " + quoted(name) + " holds bytes that are no UTF-8 text");
    seen.words.push_back(std::move(word));
  }
  return seen;
}

}  // namespace edgekit
