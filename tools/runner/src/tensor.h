// Tensors outside of ONNX Runtime, and the element types that edgekit carries.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace edgekit {

struct Dtype {
  const char* name;   // as numpy and edgekit name it
  std::int32_t onnx;  // the number in ONNX and in ONNX Runtime
  std::size_t size;   // bytes of an element, 0 for strings
  const char* npy;    // how a .npy file names it, without the byte order
};

constexpr std::int32_t kString = 8;
constexpr std::size_t kMaxRank = 32;
constexpr std::int64_t kMaxBytes = std::int64_t{1} << 32;

// Each returns null where there is no such type.
const Dtype* find_dtype(std::string_view name);
const Dtype* find_dtype(std::int32_t onnx);

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

// Bytes that keep their memory from sample to sample, aligned as ONNX Runtime's own.
class Buffer {
 public:
  char* resize(std::size_t size);
  char* data() const { return memory_.get(); }
  std::size_t size() const { return size_; }

 private:
  std::unique_ptr<char, Free> memory_;
  std::size_t size_ = 0;
  std::size_t capacity_ = 0;
};

struct Tensor {
  std::string name;
  const Dtype* dtype = nullptr;
  std::vector<std::int64_t> shape;
  Buffer bytes;                    // for numbers
  std::vector<std::string> words;  // for strings
};

// Returns the number of elements of a shape. Throws Failure: a dimension is negative, or the shape is too large.
std::int64_t count_elements(const std::vector<std::int64_t>& shape, const std::string& name);

}  // namespace edgekit
