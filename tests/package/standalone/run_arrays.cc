// Runs a bundle with sizes, one with state or one for batches, and prints what comes out:
//   run_arrays LIBONNXRUNTIME BUNDLES sizes LENGTH | steps COUNT | warm COUNT
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "edgekit_bundles.h"
#include "edgekit_run.h"

template <typename Number>
edgekit::Array Make(const std::string& dtype, std::vector<std::int64_t> shape, std::size_t count, Number first,
                    Number step) {
  edgekit::Array array{dtype, std::move(shape), std::vector<char>(count * sizeof(Number))};
  for (std::size_t i = 0; i < count; ++i) {
    const Number value = static_cast<Number>(first + step * static_cast<Number>(i));
    std::memcpy(array.bytes.data() + i * sizeof(Number), &value, sizeof value);
  }
  return array;
}

void Print(const edgekit::Arrays& outputs) {
  for (const auto& [name, array] : outputs) {
    std::printf("%s", name.c_str());
    for (const std::int64_t dim : array.shape) std::printf(" %lld", static_cast<long long>(dim));
    std::printf(":");
    for (std::size_t at = 0; at < array.bytes.size(); at += sizeof(float)) {
      float value;
      std::memcpy(&value, array.bytes.data() + at, sizeof value);
      std::printf(" %.6g", static_cast<double>(value));
    }
    std::printf("\n");
  }
}

int main(int, char** argv) {
  const edgekit::Ort ort(argv[1]);
  const std::int64_t number = std::atoi(argv[4]);
  const auto count = static_cast<std::size_t>(number);
  for (const edgekit::Variant& variant : edgekit::Bundles()) try {
      const std::string folder = std::string(argv[2]) + "/" + variant.name;
      if (std::strcmp(argv[3], "sizes") == 0 && !variant.buckets.empty()) {
        edgekit::Sizes sizes(ort, variant, folder);
        Print(sizes.Run({{"ids", Make<std::int64_t>("int64", {1, number}, count, 1, 1)},
                         {"mask", Make<float>("float32", {1, number}, count, 1, 0)}}));
      }
      if (std::strcmp(argv[3], "steps") == 0 && !variant.feeds.empty()) {
        const edgekit::Session session = edgekit::OpenSession(ort, variant, folder);
        edgekit::Stepper stepper(ort, session, variant);
        for (std::size_t step = 0; step < count; ++step)
          Print(stepper.Run({{"x", Make<float>("float32", {1, 4}, 4, static_cast<float>(step), 1)}}));
      }
      if (std::strcmp(argv[3], "warm") == 0 && variant.name == "batches-cpu") {
        const edgekit::Session session = edgekit::OpenSession(ort, variant, folder);
        const edgekit::Array gain = Make<float>("float32", {}, 1, 2, 0);
        edgekit::Warm warm(ort, session, variant, {{"x", Make<float>("float32", {1, 4}, 4, 0, 1)}, {"gain", gain}});
        for (const std::int64_t rows : {std::int64_t{1}, std::int64_t{1}, number, number, std::int64_t{1}})
          for (const float first : {1.0f, 2.0f})
            Print(warm.Run({{"x", Make<float>("float32", {rows, 4}, static_cast<std::size_t>(rows) * 4, first, 1)},
                            {"gain", gain}}));
      }
    } catch (const edgekit::Error& error) {
      std::printf("refused: %s\n", error.what());
    }
}
