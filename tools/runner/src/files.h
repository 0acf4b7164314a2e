// Files of tensors: numpy's .npy and ONNX's .pb (TensorProto).
#pragma once

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "session.h"
#include "tensor.h"

namespace edgekit {

struct CloseFile {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using File = std::unique_ptr<std::FILE, CloseFile>;

// Throws Failure: the file cannot be opened.
File open_file(const std::string& path, const char* mode);

// Throws Failure: the file cannot be read, or is larger than `most` bytes.
std::string read_file(const std::string& path, std::size_t most);

// What stands at the start of a .npy: the type and shape of what follows.
struct NpyHeader {
  const Dtype* dtype;
  std::vector<std::int64_t> shape;
  std::size_t item_size;  // bytes of an element; 4 times the letters of a string
};

// Reads a header and leaves the file at the first element. Throws Failure: it is malformed, of another byte order, in
// Fortran order, or of a type that is not carried.
NpyHeader read_npy_header(std::FILE* file, const std::string& path);

// Fills a tensor of some type and shape from the elements that follow.
void read_npy_items(std::FILE* file, const NpyHeader& header, const std::string& path, Tensor& tensor);

// Each throws Failure: the file is malformed, or cannot be written.
void read_npy(const std::string& path, Tensor& tensor);
void write_npy(const std::string& path, const View& view);
void read_pb(const std::string& path, Tensor& tensor);
void write_pb(const std::string& path, const View& view);

}  // namespace edgekit
