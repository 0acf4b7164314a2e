#include "sha256.h"

#include <cmath>
#include <cstdint>
#include <cstring>

#include "failure.h"
#include "files.h"

namespace edgekit {
namespace {

constexpr std::size_t kBlock = 64;

// The first 32 bits of the fraction of a root of a prime.
std::uint32_t fraction(long double root) {
  return static_cast<std::uint32_t>((root - std::floor(root)) * 4294967296.0L);
}

struct Constants {
  std::uint32_t start[8];
  std::uint32_t round[64];

  Constants() {
    int found = 0;
    for (int number = 2; found < 64; ++number) {
      bool prime = true;
      for (int divisor = 2; divisor * divisor <= number; ++divisor) prime = prime && number % divisor != 0;
      if (!prime) continue;
      const auto exact = static_cast<long double>(number);
      if (found < 8) start[found] = fraction(std::sqrt(exact));
      round[found++] = fraction(std::cbrt(exact));
    }
  }
};

std::uint32_t turned(std::uint32_t word, unsigned by) { return (word >> by) | (word << (32 - by)); }

void add_block(const Constants& constants, std::uint32_t (&state)[8], const unsigned char* block) {
  std::uint32_t words[64];
  for (std::size_t index = 0; index < 16; ++index) {
    const unsigned char* at = block + index * 4;
    words[index] = (std::uint32_t{at[0]} << 24) | (std::uint32_t{at[1]} << 16) | (std::uint32_t{at[2]} << 8) | at[3];
  }
  for (std::size_t index = 16; index < 64; ++index) {
    const std::uint32_t low = words[index - 15];
    const std::uint32_t high = words[index - 2];
    words[index] = words[index - 16] + words[index - 7] + (turned(low, 7) ^ turned(low, 18) ^ (low >> 3)) +
                   (turned(high, 17) ^ turned(high, 19) ^ (high >> 10));
  }
  std::uint32_t v[8];
  std::memcpy(v, state, sizeof v);
  for (std::size_t index = 0; index < 64; ++index) {
    const std::uint32_t first = v[7] + (turned(v[4], 6) ^ turned(v[4], 11) ^ turned(v[4], 25)) +
                                ((v[4] & v[5]) ^ (~v[4] & v[6])) + constants.round[index] + words[index];
    const std::uint32_t second = (turned(v[0], 2) ^ turned(v[0], 13) ^ turned(v[0], 22)) +
                                 ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
    std::memmove(v + 1, v, 7 * sizeof v[0]);
    v[4] += first;
    v[0] = first + second;
  }
  for (std::size_t index = 0; index < 8; ++index) state[index] += v[index];
}

}  // namespace

std::string digest_file(const std::string& path) {
  const Constants constants;
  std::uint32_t state[8];
  std::memcpy(state, constants.start, sizeof state);
  const File file = open_file(path, "rbe");
  unsigned char block[kBlock];
  std::uint64_t total = 0;
  std::size_t count = 0;
  while ((count = std::fread(block, 1, kBlock, file.get())) == kBlock) {
    total += count;
    add_block(constants, state, block);
  }
  if (std::ferror(file.get()) != 0) throw Failure("cannot read " + quoted(path));
  total += count;
  std::memset(block + count, 0, kBlock - count);
  block[count] = 0x80;
  if (count >= kBlock - 8) {
    add_block(constants, state, block);
    std::memset(block, 0, kBlock);
  }
  for (unsigned index = 0; index < 8; ++index) {
    block[kBlock - 1 - index] = static_cast<unsigned char>((total * 8) >> (8 * index));
  }
  add_block(constants, state, block);
  std::string hex;
  for (const std::uint32_t word : state) {
    char digits[9];
    std::snprintf(digits, sizeof digits, "%08x", static_cast<unsigned>(word));
    hex += digits;
  }
  return hex;
}

}  // namespace edgekit
