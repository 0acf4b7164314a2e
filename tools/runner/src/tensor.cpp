#include "tensor.h"

#include <new>

#include "failure.h"

namespace edgekit {
namespace {

constexpr Dtype kDtypes[] = {
    {"float32", 1, 4, "f4"}, {"float64", 11, 8, "f8"}, {"float16", 10, 2, "f2"}, {"int8", 3, 1, "i1"},
    {"uint8", 2, 1, "u1"},   {"int16", 5, 2, "i2"},    {"uint16", 4, 2, "u2"},   {"int32", 6, 4, "i4"},
    {"uint32", 12, 4, "u4"}, {"int64", 7, 8, "i8"},    {"uint64", 13, 8, "u8"},  {"bool", 9, 1, "b1"},
    {"string", kString, 0, "U"},
};
constexpr std::size_t kAlignment = 64;

}  // namespace

const Dtype* find_dtype(std::string_view name) {
  for (const Dtype& dtype : kDtypes) {
    if (name == dtype.name) return &dtype;
  }
  return nullptr;
}

const Dtype* find_dtype(std::int32_t onnx) {
  for (const Dtype& dtype : kDtypes) {
    if (onnx == dtype.onnx) return &dtype;
  }
  return nullptr;
}

char* Buffer::resize(std::size_t size) {
  if (size > capacity_ || memory_ == nullptr) {
    void* memory = nullptr;
    const std::size_t room = size + kAlignment;
    if (posix_memalign(&memory, kAlignment, room) != 0) throw std::bad_alloc();
    memory_.reset(static_cast<char*>(memory));
    capacity_ = room;
  }
  size_ = size;
  return memory_.get();
}

std::int64_t count_elements(const std::vector<std::int64_t>& shape, const std::string& name) {
  if (shape.size() > kMaxRank) throw Failure("the shape of " + quoted(name) + " has too many dimensions");
  std::int64_t bound = 1;
  std::int64_t count = 1;
  for (const std::int64_t size : shape) {
    if (size < 0) throw Failure("the shape of " + quoted(name) + " has a negative dimension");
    if (size > kMaxBytes || (size > 0 && bound > kMaxBytes / size)) {
      throw Failure("the shape of " + quoted(name) + " is too large");
    }
    bound *= size > 0 ? size : 1;
    count *= size;
  }
  return count;
}

}  // namespace edgekit
