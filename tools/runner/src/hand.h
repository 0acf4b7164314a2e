// The runner by hand: a model, folders of tensors, and a report.
#pragma once

#include "options.h"

namespace edgekit {

// Returns the exit code: 0 if every sample ran. Throws Failure: an option or a file is wrong. Throws Refusal: ONNX
// Runtime does not open or run the model.
int run_by_hand(const Options& options);

}  // namespace edgekit
