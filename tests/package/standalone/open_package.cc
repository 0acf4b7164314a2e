// Opens a model package with ONNX Runtime's own API, lets it choose a variant, and runs the self-test on its session:
//   open_package LIBONNXRUNTIME PACKAGE COMPONENT [PROVIDER LIBRARY]
#include <cstdio>
#include <cstring>

#include "edgekit_bundles.h"
#include "edgekit_loader.h"

struct OrtModelPackageOptions;
struct OrtModelPackageContext;
struct OrtModelPackageComponentContext;

namespace {

// Places in OrtModelPackageApi, which GetModelPackageApi gives since ONNX Runtime 1.31.
constexpr auto kGetModelPackageApi = static_cast<edgekit::Slot>(427);
constexpr std::size_t kCreateOptions = 0, kCreateContext = 2, kSelectComponent = 11, kGetVariantName = 13,
                      kCreateSession = 15;

template <typename... Arguments>
void Do(const edgekit::Ort& ort, std::size_t place, Arguments... arguments) {
  void* const* table = ort.Call<void* const*>(kGetModelPackageApi);
  OrtStatus* status = reinterpret_cast<OrtStatus* (*)(Arguments...)>(table[place])(arguments...);
  if (status == nullptr) return;
  throw edgekit::Error(ort.Call<const char*>(edgekit::Slot::kGetErrorMessage, static_cast<const OrtStatus*>(status)));
}

int Run(int argc, char** argv) {
  const edgekit::Ort ort(argv[1]);
  edgekit::SessionOptions options(ort);
  ort.Do(edgekit::Slot::kCreateSessionOptions, options.out());
  if (argc > 5) {
    ort.Do(edgekit::Slot::kRegisterExecutionProviderLibrary, ort.env(), static_cast<const char*>(argv[4]),
           static_cast<const char*>(argv[5]));
    const std::vector<const OrtEpDevice*> devices = edgekit::internal::FindDevices(ort, argv[4]);
    // A PC has no NPU that says which backend it is; on a phone no option is needed to choose a variant.
    const std::vector<std::pair<std::string, std::string>> backend = {{"backend_type", "htp"}};
    const edgekit::internal::Options htp(backend);
    ort.Do(edgekit::Slot::kSessionOptionsAppendExecutionProviderV2, options.get(), ort.env(), devices.data(),
           std::size_t{1}, htp.keys.data(), htp.values.data(), htp.keys.size());
  }
  OrtModelPackageOptions* intent = nullptr;
  OrtModelPackageContext* package = nullptr;
  OrtModelPackageComponentContext* component = nullptr;
  const char* name = nullptr;
  Do(ort, kCreateOptions, static_cast<const OrtEnv*>(ort.env()),
     static_cast<const OrtSessionOptions*>(options.get()), &intent);
  Do(ort, kCreateContext, static_cast<const char*>(argv[2]), &package);
  Do(ort, kSelectComponent, static_cast<const OrtModelPackageContext*>(package), static_cast<const char*>(argv[3]),
     static_cast<const OrtModelPackageOptions*>(intent), &component);
  Do(ort, kGetVariantName,
     static_cast<const OrtModelPackageComponentContext*>(component), &name);
  std::printf("chosen: %s\n", name);
  std::fflush(stdout);
  edgekit::Session session(ort);
  Do(ort, kCreateSession, static_cast<const OrtEnv*>(ort.env()),
     static_cast<const OrtModelPackageComponentContext*>(component), static_cast<const OrtSessionOptions*>(nullptr), session.out());
  for (const edgekit::Variant& variant : edgekit::Bundles()) {
    if (variant.name != name) continue;
    const auto failures = edgekit::RunSelfTest(ort, session, variant, std::string(argv[2]) + "/..");
    for (const std::string& line : failures) std::printf("%s\n", line.c_str());
    if (failures.empty()) std::printf("self-test passed\n");
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return Run(argc, argv);
  } catch (const std::exception& error) {
    std::printf("refused: %s\n", error.what());
    return 1;
  }
}
