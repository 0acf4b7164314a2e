// edgekit-runner: runs a model on this machine with the ONNX Runtime that lies beside it.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>

#include "failure.h"
#include "pipe.h"

namespace {

constexpr const char* kUsage =
    "usage: edgekit-runner --pipe\n";

int run(int count, char** words) {
  if (count == 2 && std::strcmp(words[1], "--pipe") == 0) return edgekit::serve_pipe();
  std::fputs(kUsage, stderr);
  return 2;
}

}  // namespace

int main(int count, char** words) {
  setenv("ORT_DISABLE_TELEMETRY", "1", 0);
  try {
    return run(count, words);
  } catch (const edgekit::Refusal& error) {
    std::fprintf(stderr, "edgekit-runner: %s\n", error.what());
    return 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "edgekit-runner: %s\n", error.what());
    return 2;
  }
}
