// The self-test of a bundle: its chosen golden samples, run where it will be used.
#pragma once

#include "options.h"

namespace edgekit {

// Prints the result as JSON, and returns 0 if every output is within its tolerance, else 1. Throws Failure: the bundle
// is incomplete, altered, or has no self-test. Throws Refusal: ONNX Runtime does not open or run the model.
int test_bundle(const Options& options);

}  // namespace edgekit
