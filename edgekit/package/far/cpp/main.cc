// Tests the first bundle that opens, and says why those before it did not:
//   edgekit_run LIBONNXRUNTIME BUNDLES [--only NAME] [--cpu] [--plugin LIBRARY]
#include <cstdio>
#include <cstring>
#include <optional>

#include "edgekit_bundles.h"
#include "edgekit_loader.h"

namespace {

int Run(int argc, char** argv) {
  std::string only;
  edgekit::OpenOptions how;
  for (int i = 3; i < argc; ++i) {
    if (std::strcmp(argv[i], "--cpu") == 0) how.on_cpu = true;
    else if (std::strcmp(argv[i], "--only") == 0 && i + 1 < argc) only = argv[++i];
    else if (std::strcmp(argv[i], "--plugin") == 0 && i + 1 < argc) how.plugin = argv[++i];
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
    return failures.empty() ? 0 : 1;
  }
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "edgekit_run LIBONNXRUNTIME BUNDLES [--only NAME] [--cpu] [--plugin LIBRARY]\n");
    return 2;
  }
  try {
    return Run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "edgekit_run: %s\n", error.what());
    return 2;
  }
}
