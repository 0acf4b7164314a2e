// What the loader must know of a bundle; edgekit_bundles.h, which is made from the manifests, holds one for each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace edgekit {

struct Tensor {
  std::string name;
  std::string dtype;
  std::vector<std::int64_t> shape;  // of one sample
};

struct File {
  std::string name;
  std::string sha256;
};

struct Bucket {
  std::int64_t size;
  std::string file;  // of the model that has this size
};

struct Filled {
  std::string name;
  std::vector<std::size_t> axes;  // that have the size of a bucket
  std::vector<char> element;      // what fills an input there, empty for an output
};

// What `edgekit tune` found for machines of a kind; options and keys are all of them, those of the bundle too.
struct Tuned {
  std::string system;
  std::string machine;
  unsigned cores;  // 0 for any number
  int level;
  int threads;
  int inter_threads;
  bool parallel;
  bool arena;
  bool memory_pattern;
  std::vector<std::pair<std::string, std::string>> provider_options;
  std::vector<std::pair<std::string, std::string>> session_config;
};

// A provider that gets what those before it left.
struct Chained {
  std::string provider;
  std::vector<std::pair<std::string, std::string>> provider_options;
};

struct Variant {
  std::string name;  // the bundle's folder
  std::string provider;
  std::vector<std::pair<std::string, std::string>> provider_options;
  std::vector<Chained> chain;  // between the provider and the CPU
  std::vector<std::pair<std::string, std::string>> session_config;
  std::string minimum_ort;
  std::string model;
  std::vector<File> files;
  std::vector<Tensor> inputs;
  std::vector<Tensor> outputs;
  std::string golden;   // the folder of inputs.npz, below the bundle's or beside it
  bool judged_by_float;  // by the float model's outputs of every sample, or by this model's own of those chosen
  std::size_t samples;
  double min_cosine;
  double min_sqnr_db;
  double min_top1_agreement;
  double granted_samples;
  std::vector<std::size_t> chosen;  // samples whose outputs lie in golden/expected.npz
  std::vector<std::pair<std::string, double>> tolerance;
  std::vector<std::pair<std::string, std::string>> feeds;  // inputs that hold state, and the outputs they come from
  std::vector<Bucket> buckets;                             // models of other sizes, the smallest first
  std::vector<Filled> filled;
  std::vector<Filled> cut;
  std::vector<Tuned> tuned;  // the narrower kind of machine first
};

// Returns how many golden samples the self-test of a bundle runs.
inline std::size_t CountSamples(const Variant& variant) {
  return variant.judged_by_float ? variant.samples : variant.chosen.size();
}

}  // namespace edgekit
