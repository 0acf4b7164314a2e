// edgekit-runner: runs a model on this machine with the ONNX Runtime that lies beside it.

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

#include "failure.h"
#include "hand.h"
#include "options.h"
#include "pipe.h"
#include "report.h"
#include "selftest.h"

namespace {

int run(int count, char** words) {
  const std::string first = count > 1 ? words[1] : "--help";
  if (first == "--help") {
    std::fputs(edgekit::kUsage, count > 1 ? stdout : stderr);
    return count > 1 ? 0 : 2;
  }
  if (first == "--pipe" && count == 2) return edgekit::serve_pipe();
  const edgekit::Options options = edgekit::read_options(count, words);
  return options.bundle.empty() ? edgekit::run_by_hand(options) : edgekit::test_bundle(options);
}

}  // namespace

int main(int count, char** words) {
  setenv("ORT_DISABLE_TELEMETRY", "1", 0);
  try {
    return run(count, words);
  } catch (const edgekit::Refusal& error) {
    std::fprintf(stderr, "edgekit-runner: %s\n", edgekit::first_words(error.what()).c_str());
    return 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "edgekit-runner: %s\n", edgekit::first_words(error.what()).c_str());
    return 2;
  }
}
