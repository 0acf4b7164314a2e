// A model opened as a job says, and what it gives for a sample.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "json.h"
#include "ort.h"
#include "tensor.h"

namespace edgekit {

inline constexpr const char* kCpu = "CPUExecutionProvider";

using Words = std::vector<std::pair<std::string, std::string>>;

// What edgekit's FarJob says; see edgekit/devices/process/exchange.py.
struct Job {
  std::string model;
  std::string provider = kCpu;
  std::string library;
  Words provider_options;
  Words session_config;
  std::string level = "all";
  int threads = 0;
  int inter_threads = 0;
  bool parallel = false;
  bool arena = true;
  bool memory_pattern = true;
  std::int64_t least_samples = 4;
  double budget_s = 1e9;
  bool profile = false;
  std::string runtime;
  std::int64_t repeat = 1;
  int concurrency = 1;
  bool io_binding = false;
  bool trace = false;
};

// Throws Failure: a field is missing or has the wrong type. Fields that are not known are left alone.
Job read_job(const Json& json);

struct PlacedNode {
  std::string name;
  std::string op;
  std::string domain;
  std::string provider;
  double microseconds = 0;  // of one run, where a profile was taken
};

// An output as it lies in ONNX Runtime's memory, valid until the next run.
struct View {
  std::string name;
  const Dtype* dtype;
  std::vector<std::int64_t> shape;
  const char* data;
  std::size_t size;
  std::vector<std::string> words;
  std::shared_ptr<const void> holds;  // what the data lie in, unless that is an output of the session
};

class Session {
 public:
  // Throws Failure: the level or an option does not exist. Throws Refusal: ONNX Runtime does not open the model.
  Session(const Ort& ort, const Job& job);

  double load_ms() const { return load_ms_; }
  const std::vector<std::string>& inputs() const { return inputs_; }
  const std::vector<std::string>& outputs() const { return outputs_; }

  // Gives the session its inputs for the runs that follow; the memory of the tensors is used as it is.
  void bind(std::vector<Tensor>& tensors);

  // Returns the milliseconds of one run. With `io_binding` outputs are written where those of the run before lie.
  double run();

  // Makes so many runs, `concurrency` at once, appends the milliseconds of each to `times`, and returns those of all
  // together.
  double run_together(std::int64_t count, int concurrency, std::vector<double>& times);

  // Returns what the last run gave.
  std::vector<View> views() const;

  // Returns the nodes and their providers: before any run from the session, or after one run from its profile.
  std::vector<PlacedNode> placement();

  // Ends the profiler that watched every run, and returns its file, which the caller closes.
  int end_trace();

 private:
  using Values = std::vector<Owned<OrtValue>>;

  double run_into(Values& given) const;
  void open(const Job& job);
  void append_provider(const Job& job);
  void append_library(const Job& job);
  void append_nnapi(const Words& options);
  void watch_profile();
  void hide_profile();
  std::vector<PlacedNode> assigned() const;
  std::vector<PlacedNode> profiled();
  View view(const std::string& name, OrtValue* value) const;
  std::vector<View> flatten(const std::string& name, OrtValue* value) const;
  std::vector<std::string> names(bool of_inputs) const;

  const Ort& ort_;
  Owned<OrtEnv> env_;
  Owned<OrtMemoryInfo> memory_;
  Owned<OrtSessionOptions> options_;
  Owned<OrtSession> session_;
  OrtAllocator* allocator_ = nullptr;
  bool trace_ = false;
  std::string profile_folder_;
  int profile_file_ = -1;
  double load_ms_ = 0;
  std::vector<std::string> inputs_;
  std::vector<std::string> outputs_;
  std::vector<Owned<OrtValue>> values_;
  std::vector<const char*> fed_names_;
  std::vector<const OrtValue*> fed_;
  Values given_;
  bool io_binding_ = false;
};

// Returns milliseconds of a clock that never goes back.
double now_ms();

}  // namespace edgekit
