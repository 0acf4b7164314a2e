// Rows of the arrays in a .npz, one at a time; edgekit stores them, not deflated.
#pragma once

#include <string>
#include <vector>

#include "files.h"

namespace edgekit {

class Npz {
 public:
  // Throws Failure: it is no zip, or holds an array that is deflated or malformed.
  explicit Npz(const std::string& path);

  // Returns the names of the arrays, sorted as they stand.
  const std::vector<std::string>& names() const { return names_; }

  // Fills a tensor with row `row` of an array: its first axis counts the samples. Throws Failure: there is no such row.
  void read_row(std::size_t index, std::int64_t row, Tensor& tensor);

 private:
  void list_entries();

  std::string path_;
  File file_;
  std::vector<std::string> names_;
  std::vector<std::int64_t> offsets_;
};

}  // namespace edgekit
