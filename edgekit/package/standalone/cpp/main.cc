// Tests the first bundle that opens, and says why those before it did not:
//   edgekit_run LIBONNXRUNTIME BUNDLES [--only NAME] [--cpu] [--plugin LIBRARY] [--time REQUESTS]
//
// With --time it says what a request takes of all cores together, from 21 rounds of so many: with a Warm, with a plain
// run, and with a session of its own.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <optional>
#include <vector>

#include "edgekit_bundles.h"
#include "edgekit_loader.h"
#include "edgekit_run.h"

namespace {

template <typename Request>
double TimeEach(int count, const Request& request) {
  const std::clock_t begin = std::clock();
  for (int i = 0; i < count; ++i) request();
  return 1e3 * static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC / count;
}

void Time(const edgekit::Ort& ort, const edgekit::Session& session, const edgekit::Variant& variant,
          const std::string& folder, const edgekit::OpenOptions& how, int count) {
  const edgekit::Golden golden(folder + "/" + variant.golden + "/inputs.npz");
  edgekit::Arrays sample;
  for (const edgekit::Tensor& tensor : variant.inputs) {
    const char* row = golden.Rows(tensor, variant.samples);
    const std::size_t bytes = edgekit::CountElements(tensor) * edgekit::FindDtype(tensor.dtype).bytes;
    sample[tensor.name] = {tensor.dtype, tensor.shape, std::vector<char>(row, row + bytes)};
  }
  edgekit::Warm warm(ort, session, variant, sample);
  // In rounds of all three, of which the median counts: other programs and the clock change with time.
  constexpr std::size_t kRounds = 21;
  std::array<std::vector<double>, 3> took;
  for (std::size_t round = 0; round < kRounds; ++round) {
    took[0].push_back(TimeEach(count, [&] { warm.Run(sample); }));
    took[1].push_back(TimeEach(count, [&] { edgekit::RunArrays(ort, session, variant, sample); }));
    took[2].push_back(TimeEach(1, [&] {
      edgekit::RunArrays(ort, edgekit::OpenSession(ort, variant, folder, how), variant, sample);
    }));
  }
  for (std::vector<double>& times : took) std::sort(times.begin(), times.end());
  std::printf("%s: CPU time of a request: %.3f ms warm, %.3f ms run, %.3f ms with a session of its own\n",
              variant.name.c_str(), took[0][kRounds / 2], took[1][kRounds / 2], took[2][kRounds / 2]);
}

int Run(int argc, char** argv) {
  int requests = 0;
  std::string only;
  edgekit::OpenOptions how;
  for (int i = 3; i < argc; ++i) {
    if (std::strcmp(argv[i], "--cpu") == 0) how.on_cpu = true;
    else if (std::strcmp(argv[i], "--only") == 0 && i + 1 < argc) only = argv[++i];
    else if (std::strcmp(argv[i], "--plugin") == 0 && i + 1 < argc) how.plugin = argv[++i];
    else if (std::strcmp(argv[i], "--time") == 0 && i + 1 < argc) requests = std::atoi(argv[++i]);
    else throw edgekit::Error(std::string("what is '") + argv[i] + "'?");
  }
  const edgekit::Ort ort(argv[1]);
  for (const edgekit::Variant& variant : edgekit::Bundles()) {
    if (!only.empty() && only != variant.name) continue;
    const std::string folder = std::string(argv[2]) + "/" + variant.name;
    std::optional<edgekit::Session> session;
    try {
      session.emplace(edgekit::OpenSession(ort, variant, folder, how));
    } catch (const edgekit::Error& error) {
      std::printf("%s: not opened: %s\n", variant.name.c_str(), error.what());
      continue;
    }
    const std::vector<std::string> failures = edgekit::RunSelfTest(ort, *session, variant, folder);
    for (const std::string& line : failures) std::printf("%s: %s\n", variant.name.c_str(), line.c_str());
    if (failures.empty())
      std::printf("%s: self-test passed with %zu samples\n", variant.name.c_str(), edgekit::CountSamples(variant));
    if (requests > 0) Time(ort, *session, variant, folder, how, requests);
    return failures.empty() ? 0 : 1;
  }
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "edgekit_run LIBONNXRUNTIME BUNDLES [--only NAME] [--cpu] [--plugin LIBRARY] [--time REQUESTS]\n");
    return 2;
  }
  try {
    return Run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "edgekit_run: %s\n", error.what());
    return 2;
  }
}
