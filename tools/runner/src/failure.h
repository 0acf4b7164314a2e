// What can go wrong, in two kinds.
#pragma once

#include <stdexcept>
#include <string>

namespace edgekit {

// The caller gave something wrong: exit code 2.
struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// ONNX Runtime would not open or run the model: a finding, exit code 1 or the status "refused".
struct Refusal : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline std::string quoted(const std::string& text) { return "'" + text.substr(0, 200) + "'"; }

}  // namespace edgekit
