// Does the loader pass on every session key and what was tuned, and does its self-test say no?
//
//   check_loader LIBONNXRUNTIME BUNDLES NAME SYSTEM MACHINE
#include <iostream>

#include "edgekit_bundles.h"
#include "edgekit_loader.h"

// Opens a bundle that was tuned, for a kind of machine, to a level that there is none of.
static const char* OpenTuned(const edgekit::Ort& ort, edgekit::Variant variant, const std::string& folder,
                             const std::string& system, const std::string& machine, bool tuned) {
  variant.provider = "CPUExecutionProvider";
  variant.session_config.clear();
  const unsigned cores = std::thread::hardware_concurrency();
  variant.tuned = {{system, machine, cores, 77, 1, 0, false, true, true, {}, {}}};
  edgekit::OpenOptions how;
  how.tuned = tuned;
  try {
    edgekit::OpenSession(ort, variant, folder, how);
  } catch (const edgekit::Error&) {
    return "refused";
  }
  return "opened";
}

int main(int, char** argv) {
  edgekit::OpenOptions how;
  how.on_cpu = true;
  const edgekit::Ort ort(argv[1]);
  for (const edgekit::Variant& variant : edgekit::Bundles()) {
    if (variant.name != argv[3]) continue;
    const std::string folder = std::string(argv[2]) + "/" + variant.name;
    const edgekit::Session session = edgekit::OpenSession(ort, variant, folder, how);
    std::cout << edgekit::RunSelfTest(ort, session, variant, folder).size() << " failures\n";
    std::cout << "tuned here: " << OpenTuned(ort, variant, folder, argv[4], argv[5], true) << '\n';
    std::cout << "tuned elsewhere: " << OpenTuned(ort, variant, folder, argv[4], "other", true) << '\n';
    std::cout << "untuned: " << OpenTuned(ort, variant, folder, argv[4], argv[5], false) << '\n';
    edgekit::Variant strict = variant;
    strict.min_sqnr_db = 199;
    for (auto& entry : strict.tolerance) entry.second = -1;
    for (const std::string& line : edgekit::RunSelfTest(ort, session, strict, folder)) std::cout << line << '\n';
    for (std::size_t i = 0; i < variant.session_config.size(); ++i) {
      edgekit::Variant endless = variant;
      endless.session_config[i].second.assign(100000, 'x');
      try {
        edgekit::OpenSession(ort, endless, folder, how);
      } catch (const edgekit::Error& error) {
        std::cout << "refused: " << endless.session_config[i].first << '\n';
      }
    }
  }
}
