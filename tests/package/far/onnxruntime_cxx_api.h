// The calls of ONNX Runtime's C++ API that app/model_session.h makes, declared by hand after its documentation: its real
// headers are in no package registry. It proves how the snippet is written, not that the library does what it says.
#pragma once

#include <string>
#include <unordered_map>

namespace Ort {

struct Env {
  Env();
};

struct SessionOptions {
  SessionOptions();
  SessionOptions& SetIntraOpNumThreads(int threads);
  SessionOptions& AddConfigEntry(const char* key, const char* value);
  SessionOptions& AppendExecutionProvider(const std::string& name,
                                          const std::unordered_map<std::string, std::string>& options = {});
};

struct Session {
  Session(const Env& env, const char* path, const SessionOptions& options);
};

}  // namespace Ort
