// The options of the runner's command line.
#pragma once

#include <string>

#include "session.h"

namespace edgekit {

extern const char* const kUsage;

struct Options {
  Job job;
  std::string inputs;
  std::string outputs;
  std::string format = "npy";
  std::string report;
  std::int64_t warmup = 0;
  std::string bundle;             // of --self-test
  std::string form;               // of the bundle's model
  bool own_provider = false;      // the provider was given, and is not that of the bundle
};

// Throws Failure: an option does not exist, lacks its value, or has a wrong one.
Options read_options(int count, char** words);

}  // namespace edgekit
