// The pipe protocol: a job and samples come in, tensors and a report go out; see edgekit/devices/process/exchange.py.
#pragma once

namespace edgekit {

// Returns the exit code: 0 if the report could be written, even if it holds a refusal.
int serve_pipe();

}  // namespace edgekit
