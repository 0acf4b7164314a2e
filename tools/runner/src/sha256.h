// SHA-256, by FIPS 180-4.
#pragma once

#include <string>

namespace edgekit {

// Returns the digest of a file in hex. Throws Failure: it cannot be read.
std::string digest_file(const std::string& path);

}  // namespace edgekit
