// Golden samples: the arrays of an .npz whose entries are stored, one row a sample, on a little-endian machine.
#pragma once

#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "edgekit_ort.h"
#include "edgekit_variant.h"

namespace edgekit {

struct Dtype {
  int onnx;           // its number in ONNXTensorElementDataType
  std::size_t bytes;  // of one element
  const char* numpy;  // how numpy writes it
};

// Returns what is known of an element type; strings and the rest have no self-test.
inline Dtype FindDtype(const std::string& name) {
  static const std::map<std::string, Dtype> kDtypes = {
      {"float32", {1, 4, "<f4"}}, {"uint8", {2, 1, "|u1"}},  {"int8", {3, 1, "|i1"}},    {"uint16", {4, 2, "<u2"}},
      {"int16", {5, 2, "<i2"}},   {"int32", {6, 4, "<i4"}},  {"int64", {7, 8, "<i8"}},   {"bool", {9, 1, "|b1"}},
      {"float16", {10, 2, "<f2"}}, {"float64", {11, 8, "<f8"}}, {"uint32", {12, 4, "<u4"}}, {"uint64", {13, 8, "<u8"}}};
  const auto found = kDtypes.find(name);
  if (found == kDtypes.end()) throw Error("tensors of " + name + " have no self-test");
  return found->second;
}

inline std::size_t CountElements(const Tensor& tensor) {
  std::size_t count = 1;
  for (const std::int64_t dim : tensor.shape) count *= static_cast<std::size_t>(dim);
  return count;
}

class Golden {
 public:
  explicit Golden(const std::string& path) : path_(path) {
    std::ifstream file(path, std::ios::binary);
    data_.assign(std::istreambuf_iterator<char>(file), {});
    std::size_t at = 0;
    while (Number(at, 4) == 0x04034b50) at = AddEntry(at);
  }

  // Returns the rows of a tensor, one after another.
  const char* Rows(const Tensor& tensor, std::size_t samples) const {
    const auto found = entries_.find(tensor.name + ".npy");
    if (found == entries_.end()) throw Error("'" + path_ + "' lacks '" + tensor.name + "'");
    const auto [begin, size] = found->second;
    const std::size_t header = 10 + Number(begin + 8, 2);
    const Dtype dtype = FindDtype(tensor.dtype);
    const bool plain = size >= header && std::memcmp(data_.data() + begin, "\x93NUMPY\x01", 7) == 0 &&
                       std::string(data_.data() + begin, header).find(dtype.numpy) != std::string::npos;
    if (!plain || size - header != samples * CountElements(tensor) * dtype.bytes)
      throw Error("'" + tensor.name + "' in '" + path_ + "' does not hold " + std::to_string(samples) + " samples");
    return data_.data() + begin + header;
  }

 private:
  // Reads one local header of the zip, and returns where the next begins.
  std::size_t AddEntry(std::size_t at) {
    const std::size_t name_size = Number(at + 26, 2), extra_size = Number(at + 28, 2);
    const std::size_t extra = at + 30 + name_size, begin = extra + extra_size;
    if ((Number(at + 6, 2) & 8) != 0 || Number(at + 8, 2) != 0) throw Error("'" + path_ + "' is compressed");
    std::size_t size = Number(at + 22, 4);
    if (size == 0xffffffff && Number(extra, 2) == 1) size = Number(extra + 4, 8);
    if (begin > data_.size() || size > data_.size() - begin) throw Error("'" + path_ + "' is cut off");
    entries_[std::string(data_.data() + at + 30, name_size)] = {begin, size};
    return begin + size;
  }

  std::size_t Number(std::size_t at, std::size_t bytes) const {
    std::uint64_t value = 0;
    if (at > data_.size() || data_.size() - at < bytes) return 0;
    std::memcpy(&value, data_.data() + at, bytes);
    return static_cast<std::size_t>(value);
  }

  std::string path_;
  std::vector<char> data_;
  std::map<std::string, std::pair<std::size_t, std::size_t>> entries_;
};

}  // namespace edgekit
