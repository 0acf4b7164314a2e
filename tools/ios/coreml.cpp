// Core ML's place in ONNX Runtime: where the provider would load and run a model, the model goes to edgekit.
//
// The provider's own code partitions the graph, builds the model and writes it. Its class `Execution` stands for Apple's
// framework; each function of it is replaced here. A model is computed elsewhere: $EDGEKIT_COREML_PIPES is a folder with
// the pipes `ask` and `answer`. A question is a line of JSON and then bytes; so is its answer. Without pipes a model can
// be loaded and not run. Types are those of ONNX Runtime's core/providers/coreml/model/model.h.
#include <fcntl.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "image.h"

namespace {

struct TensorInfo {
  std::int32_t type;
  std::vector<std::int64_t> shape;
};

struct TensorData {
  TensorInfo info;
  void* buffer;
};

struct Span {
  std::size_t count;
  const std::int64_t* items;
};

using Inputs = std::unordered_map<std::string, TensorData>;
using Outputs = std::unordered_map<std::string, TensorInfo>;
using FindBuffer = std::function<void*(const std::string&, int, Span)>;

// A status is one pointer, null for success; ONNX Runtime's own constructor makes the others.
using MakeStatus = void (*)(void** status, int category, int code, const std::string& message);
constexpr int kOnnxRuntime = 2;  // StatusCategory::ONNXRUNTIME
constexpr int kFail = 1;
MakeStatus make_status;

void** set_status(void** status, const std::string& reason) {
  *status = nullptr;
  if (!reason.empty()) make_status(status, kOnnxRuntime, kFail, reason);
  return status;
}

std::FILE* ask;
std::FILE* answer;
std::mutex pipes;

// Whoever started this process holds both ends of both pipes while the other side lives. Without waiting for that side,
// a pipe that nobody holds any more fails to open, or ends.
std::FILE* open_pipe(const std::string& path, int access, const char* mode) {
  const int file = open(path.c_str(), access | O_NONBLOCK | O_CLOEXEC);
  if (file >= 0) fcntl(file, F_SETFL, access);
  return file < 0 ? nullptr : fdopen(file, mode);
}

bool open_pipes() {
  const char* folder = std::getenv("EDGEKIT_COREML_PIPES");
  if (ask == nullptr && folder != nullptr) {
    ask = open_pipe(std::string(folder) + "/ask", O_WRONLY, "wb");
    answer = open_pipe(std::string(folder) + "/answer", O_RDONLY, "rb");
  }
  return ask != nullptr && answer != nullptr;
}

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char letter : text) {
    char code[8];
    std::snprintf(code, sizeof code, "\\u%04x", static_cast<unsigned char>(letter));
    const bool plain = static_cast<unsigned char>(letter) >= 0x20 && letter != '"' && letter != '\\';
    out += plain ? std::string(1, letter) : std::string(code);
  }
  return out + "\"";
}

std::string listed(const std::vector<std::int64_t>& shape) {
  std::string out = "[";
  for (const std::int64_t size : shape) out += (out.size() > 1 ? "," : "") + std::to_string(size);
  return out + "]";
}

std::size_t size_of(std::int32_t type) {
  switch (type) {  // TensorProto.DataType
    case 1:
    case 6: return 4;
    case 7: return 8;
    case 9: return 1;
    case 10: return 2;
    default: return 0;
  }
}

std::size_t count_of(const std::vector<std::int64_t>& shape) {
  std::size_t count = 1;
  for (const std::int64_t size : shape) count *= static_cast<std::size_t>(size);
  return count;
}

// Reads the line of an answer, which says in a word why there is none; empty means that bytes follow.
std::string read_reason() {
  std::string line;
  for (int letter = std::fgetc(answer); letter != '\n'; letter = std::fgetc(answer)) {
    if (letter == EOF) return "the process that computes Core ML's models has ended";
    line += static_cast<char>(letter);
  }
  return line;
}

bool read_whole(void* to, std::size_t size) { return std::fread(to, 1, size, answer) == size; }

// What stands behind an `Execution`: its memory belongs to ONNX Runtime, and begins with this pointer.
struct Loaded {
  std::string path;
  int number;
};

void make_execution(Loaded** self, const std::string& path, const void*, const void*) {
  static int count;
  *self = new Loaded{path, count++};
}

void end_execution(Loaded** self) { delete *self; }

void** load_model(void** status, Loaded** self) {
  if (std::getenv("EDGEKIT_COREML_PIPES") == nullptr) return set_status(status, "");
  const std::lock_guard<std::mutex> lock(pipes);
  if (!open_pipes()) return set_status(status, "the pipes to what computes Core ML's models cannot be opened");
  std::fprintf(ask, "{\"ask\":\"model\",\"id\":%d,\"path\":%s}\n", (*self)->number, quoted((*self)->path).c_str());
  std::fflush(ask);
  return set_status(status, read_reason());
}

// One output: its rank and sizes, then its bytes, as the provider's own code copies them.
std::string take_output(const std::string& name, const TensorInfo& info, const FindBuffer& find_buffer) {
  std::int64_t rank = 0;
  if (!read_whole(&rank, sizeof rank) || rank < 0 || rank > 16) return "the answer is cut off";
  std::vector<std::int64_t> shape(static_cast<std::size_t>(rank));
  if (!read_whole(shape.data(), shape.size() * sizeof shape[0])) return "the answer is cut off";
  void* buffer = find_buffer(name, info.type, Span{shape.size(), shape.data()});
  return read_whole(buffer, count_of(shape) * size_of(info.type)) ? "" : "the answer is cut off";
}

void** predict(void** status, Loaded** self, const Inputs& inputs, const Outputs& outputs, const FindBuffer& find) {
  const std::lock_guard<std::mutex> lock(pipes);
  if (!open_pipes()) return set_status(status, "nothing computes Core ML's models here");
  std::string line = "{\"ask\":\"run\",\"id\":" + std::to_string((*self)->number) + ",\"inputs\":[";
  for (const auto& [name, data] : inputs) {
    line += line.back() == '[' ? "" : ",";
    line += "{\"name\":" + quoted(name) + ",\"type\":" + std::to_string(data.info.type) + ",\"shape\":";
    line += listed(data.info.shape) + "}";
  }
  line += "],\"outputs\":[";
  for (const auto& [name, info] : outputs) {
    line += line.back() == '[' ? "" : ",";
    line += "{\"name\":" + quoted(name) + ",\"type\":" + std::to_string(info.type) + ",\"shape\":" + listed(info.shape) + "}";
  }
  line += "]}\n";
  std::fwrite(line.data(), 1, line.size(), ask);
  for (const auto& [name, data] : inputs) {
    std::fwrite(data.buffer, size_of(data.info.type), count_of(data.info.shape), ask);
  }
  std::fflush(ask);
  std::string reason = read_reason();
  for (const auto& [name, info] : outputs) {
    if (reason.empty()) reason = take_output(name, info, find);
  }
  return set_status(status, reason);
}

// Where a model is written: into $EDGEKIT_COREML_MODELS, under a name that the order decides.
std::string* make_path(std::string* out) {
  static int count;
  const char* folder = std::getenv("EDGEKIT_COREML_MODELS");
  return new (out) std::string(std::string(folder != nullptr ? folder : "/tmp") + "/model" + std::to_string(count++));
}

struct Replaced {
  const char* name;
  void* function;
};

const Replaced kReplaced[] = {
    {"__ZN11onnxruntime6coreml4util20GetTemporaryFilePathEv", reinterpret_cast<void*>(make_path)},
    {"__ZN11onnxruntime6coreml9ExecutionC1E", reinterpret_cast<void*>(make_execution)},
    {"__ZN11onnxruntime6coreml9ExecutionC2E", reinterpret_cast<void*>(make_execution)},
    {"__ZN11onnxruntime6coreml9ExecutionD1E", reinterpret_cast<void*>(end_execution)},
    {"__ZN11onnxruntime6coreml9ExecutionD2E", reinterpret_cast<void*>(end_execution)},
    {"__ZN11onnxruntime6coreml9Execution9LoadModelE", reinterpret_cast<void*>(load_model)},
    {"__ZN11onnxruntime6coreml9Execution7PredictE", reinterpret_cast<void*>(predict)},
};
constexpr const char* kStatus = "__ZN11onnxruntime6common6StatusC1ENS0_14StatusCategoryEiRK";

// Finds a function by the beginning of its mangled name: its class, its own name, and the first of its parameters.
char* find_function(const image* in, const char* beginning) {
  for (unsigned index = 0; index < in->symbol_count; ++index) {
    const symbol& found = in->symbols[index];
    if ((found.type & 0x0e) != 0x0e) continue;
    if (std::strncmp(symbol_name(in, &found), beginning, std::strlen(beginning)) == 0) return in->base + found.value;
  }
  return nullptr;
}

void write_jump(char* from, void* to) {
  std::memcpy(from, "\xff\x25\0\0\0\0", 6);  // jmp *(%rip)
  std::memcpy(from + 6, &to, sizeof to);
}

}  // namespace

bool replace_functions(image* in) {
  for (const Replaced& replaced : kReplaced) {
    char* place = find_function(in, replaced.name);
    if (place == nullptr) return fail("the object has no %s: another version of ONNX Runtime?", replaced.name);
    write_jump(place, replaced.function);
  }
  make_status = reinterpret_cast<MakeStatus>(find_function(in, kStatus));
  return make_status != nullptr || fail("the object has no constructor of a status");
}
