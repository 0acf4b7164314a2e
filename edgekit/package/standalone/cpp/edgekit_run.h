// Runs bundles on arrays: samples of any length in the smallest model that takes them, requests of a server, and models
// with state.
//
//   edgekit::Sizes sizes(ort, variant, folder);
//   edgekit::Arrays outputs = sizes.Run({{"input_ids", ids}, {"attention_mask", mask}});
//
//   edgekit::Warm warm(ort, session, variant, sample);  // for a server
//   edgekit::Arrays outputs = warm.Run(batch);
//
//   edgekit::Stepper stepper(ort, session, variant);
//   edgekit::Arrays outputs = stepper.Run({{"input", chunk}});
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "edgekit_loader.h"

namespace edgekit {

struct Array {
  std::string dtype;  // numpy's name, "float32"
  std::vector<std::int64_t> shape;
  std::vector<char> bytes;  // in the machine's order, the last axis first
};

using Arrays = std::map<std::string, Array>;

namespace internal {

inline std::size_t Product(const std::vector<std::int64_t>& shape, std::size_t from, std::size_t to) {
  std::size_t product = 1;
  for (std::size_t axis = from; axis < to; ++axis) product *= static_cast<std::size_t>(shape[axis]);
  return product;
}

// Returns `count` places of an array on one axis, the first of them `from`; those beyond its end hold `fill`.
inline Array Window(const Array& array, std::size_t axis, std::int64_t from, std::int64_t count,
                    const std::vector<char>& fill = {}) {
  const std::size_t bytes = FindDtype(array.dtype).bytes;
  const std::size_t inner = Product(array.shape, axis + 1, array.shape.size()) * bytes;
  const std::size_t outer = Product(array.shape, 0, axis);
  Array made{array.dtype, array.shape, {}};
  made.shape[axis] = count;
  for (std::size_t row = 0; row < outer; ++row)
    for (std::int64_t place = from; place < from + count; ++place) {
      if (place < array.shape[axis]) {
        const auto at = (row * static_cast<std::size_t>(array.shape[axis]) + static_cast<std::size_t>(place)) * inner;
        const auto begin = array.bytes.begin() + static_cast<std::ptrdiff_t>(at);
        made.bytes.insert(made.bytes.end(), begin, begin + static_cast<std::ptrdiff_t>(inner));
      } else {
        for (std::size_t i = 0; i < inner; i += bytes) made.bytes.insert(made.bytes.end(), fill.begin(), fill.end());
      }
    }
  return made;
}

// Returns two arrays one after the other on an axis.
inline Array Join(const Array& first, const Array& second, std::size_t axis) {
  const std::size_t bytes = FindDtype(first.dtype).bytes, outer = Product(first.shape, 0, axis);
  const std::size_t left = Product(first.shape, axis, first.shape.size()) * bytes;
  const std::size_t right = Product(second.shape, axis, second.shape.size()) * bytes;
  Array made{first.dtype, first.shape, {}};
  made.shape[axis] += second.shape[axis];
  for (std::size_t row = 0; row < outer; ++row) {
    made.bytes.insert(made.bytes.end(), first.bytes.data() + row * left, first.bytes.data() + (row + 1) * left);
    made.bytes.insert(made.bytes.end(), second.bytes.data() + row * right, second.bytes.data() + (row + 1) * right);
  }
  return made;
}

inline void CheckArray(const std::string& name, const Array& array, const Tensor& tensor) {
  const std::size_t bytes = Product(array.shape, 0, array.shape.size()) * FindDtype(array.dtype).bytes;
  if (array.dtype != tensor.dtype || array.shape.size() != tensor.shape.size() || array.bytes.size() != bytes)
    throw Error("input '" + name + "' is no " + tensor.dtype + " of " + std::to_string(tensor.shape.size()) + " axes");
}

// Returns the tensor of an input, which lies in the array's own memory.
inline Value MakeInput(const Ort& ort, const MemoryInfo& memory, const Tensor& tensor, const Arrays& inputs) {
  const auto found = inputs.find(tensor.name);
  if (found == inputs.end()) throw Error("input '" + tensor.name + "' is missing");
  const Array& array = found->second;
  CheckArray(tensor.name, array, tensor);
  return MakeTensor(ort, memory, {tensor.name, array.dtype, array.shape}, array.bytes.data(), 0);
}

inline Array ReadArray(const Ort& ort, const Value& value, const std::string& dtype) {
  ShapeInfo info(ort);
  int found = 0;
  std::size_t axes = 0;
  void* data = nullptr;
  ort.Do(Slot::kGetTensorTypeAndShape, static_cast<const OrtValue*>(value.get()), info.out());
  const auto* known = static_cast<const OrtTensorTypeAndShapeInfo*>(info.get());
  ort.Do(Slot::kGetTensorElementType, known, &found);
  ort.Do(Slot::kGetDimensionsCount, known, &axes);
  Array array{dtype, std::vector<std::int64_t>(axes), {}};
  ort.Do(Slot::kGetDimensions, known, array.shape.data(), axes);
  ort.Do(Slot::kGetTensorMutableData, value.get(), &data);
  if (found != FindDtype(dtype).onnx) throw Error("an output has another type than the bundle says");
  const auto* begin = static_cast<const char*>(data);
  array.bytes.assign(begin, begin + Product(array.shape, 0, axes) * FindDtype(dtype).bytes);
  return array;
}

}  // namespace internal

// Returns what a session makes of arrays: the outputs of fixed shape that the bundle names.
inline Arrays RunArrays(const Ort& ort, const Session& session, const Variant& variant, const Arrays& inputs) {
  internal::MemoryInfo memory(ort);
  ort.Do(Slot::kCreateCpuMemoryInfo, 0, 0, memory.out());
  std::vector<const char*> input_names, output_names;
  std::vector<Value> fed;
  std::vector<const OrtValue*> fed_handles;
  for (const Tensor& tensor : variant.inputs) {
    input_names.push_back(tensor.name.c_str());
    fed.push_back(internal::MakeInput(ort, memory, tensor, inputs));
    fed_handles.push_back(fed.back().get());
  }
  for (const Tensor& tensor : variant.outputs) output_names.push_back(tensor.name.c_str());
  std::vector<OrtValue*> handles(variant.outputs.size(), nullptr);
  ort.Do(Slot::kRun, session.get(), static_cast<const void*>(nullptr), input_names.data(), fed_handles.data(),
         fed_handles.size(), output_names.data(), output_names.size(), handles.data());
  std::vector<Value> got;
  for (OrtValue* handle : handles) {
    got.emplace_back(ort);
    *got.back().out() = handle;
  }
  Arrays outputs;
  for (std::size_t i = 0; i < got.size(); ++i)
    outputs[variant.outputs[i].name] = internal::ReadArray(ort, got[i], variant.outputs[i].dtype);
  return outputs;
}

// Runs a session as a server should: one session for all requests, warmed up before the first, outputs bound. They are
// written where those of the run before lie as long as the shapes of the inputs stay; a batch of another size is bound
// anew. Threads may share the session, each with a Warm of its own. Outputs whose shape depends on the values need
// RunArrays.
class Warm {
 public:
  // `sample` is run once: that chooses kernels and plans memory, which no request should wait for.
  Warm(const Ort& ort, const Session& session, const Variant& variant, const Arrays& sample)
      : ort_(ort), session_(session), variant_(variant), memory_(ort), binding_(ort) {
    ort.Do(Slot::kCreateCpuMemoryInfo, 0, 0, memory_.out());
    ort.Do(Slot::kCreateIoBinding, session.get(), binding_.out());
    Run(sample);
  }

  // Returns the outputs for inputs, which may be a batch where the bundle leaves its first axis open.
  Arrays Run(const Arrays& inputs) {
    std::vector<Value> fed;
    std::vector<std::vector<std::int64_t>> shapes;
    for (const Tensor& tensor : variant_.inputs) {
      fed.push_back(internal::MakeInput(ort_, memory_, tensor, inputs));
      shapes.push_back(inputs.at(tensor.name).shape);
      ort_.Do(Slot::kBindInput, binding_.get(), tensor.name.c_str(), static_cast<const OrtValue*>(fed.back().get()));
    }
    const bool is_new = shapes != shapes_;
    if (is_new) {
      // No output of the old shapes may stay bound if this run fails.
      shapes_.clear();
      made_.clear();
      for (const Tensor& tensor : variant_.outputs)
        ort_.Do(Slot::kBindOutputToDevice, binding_.get(), tensor.name.c_str(),
                static_cast<const OrtMemoryInfo*>(memory_.get()));
    }
    ort_.Do(Slot::kRunWithBinding, session_.get(), static_cast<const void*>(nullptr),
            static_cast<const OrtIoBinding*>(binding_.get()));
    if (is_new) {
      TakeOutputs();
      shapes_ = std::move(shapes);
    }
    Arrays outputs;
    for (std::size_t i = 0; i < made_.size(); ++i)
      outputs[variant_.outputs[i].name] = internal::ReadArray(ort_, made_[i], variant_.outputs[i].dtype);
    return outputs;
  }

 private:
  // Keeps the outputs that the run made, and has the next run write there.
  void TakeOutputs() {
    OrtAllocator* allocator = nullptr;
    OrtValue** values = nullptr;
    std::size_t count = 0;
    ort_.Do(Slot::kGetAllocatorWithDefaultOptions, &allocator);
    ort_.Do(Slot::kGetBoundOutputValues, static_cast<const OrtIoBinding*>(binding_.get()), allocator, &values, &count);
    for (std::size_t i = 0; i < count; ++i) {
      made_.emplace_back(ort_);
      *made_.back().out() = values[i];
    }
    ort_.Do(Slot::kAllocatorFree, allocator, static_cast<void*>(values));
    for (std::size_t i = 0; i < count; ++i)
      ort_.Do(Slot::kBindOutput, binding_.get(), variant_.outputs[i].name.c_str(),
              static_cast<const OrtValue*>(made_[i].get()));
  }

  const Ort& ort_;
  const Session& session_;
  const Variant& variant_;
  internal::MemoryInfo memory_;
  Owned<OrtIoBinding, Slot::kReleaseIoBinding> binding_;
  std::vector<Value> made_;
  std::vector<std::vector<std::int64_t>> shapes_;
};

// Runs samples of any length with a bundle that has models of several: each in the smallest that takes it. Inputs are
// filled at their end up to that size, and outputs cut back. A session is opened when it is first needed.
class Sizes {
 public:
  Sizes(const Ort& ort, const Variant& variant, std::string folder, OpenOptions how = {})
      : ort_(ort), variant_(variant), folder_(std::move(folder)), how_(std::move(how)) {}

  Arrays Run(const Arrays& inputs) {
    for (const Tensor& tensor : variant_.inputs) {
      const auto found = inputs.find(tensor.name);
      if (found == inputs.end()) throw Error("input '" + tensor.name + "' is missing");
      internal::CheckArray(tensor.name, found->second, tensor);
    }
    const std::int64_t length = Measure(inputs);
    for (const Bucket& bucket : variant_.buckets)
      if (length > 0 && bucket.size >= length) return RunIn(bucket, length, inputs);
    throw Error("'" + variant_.name + "' takes no sample of " + std::to_string(length));
  }

 private:
  std::int64_t Measure(const Arrays& inputs) const {
    std::int64_t length = -1;
    for (const Filled& filled : variant_.filled) {
      for (const std::size_t axis : filled.axes) {
        const std::int64_t size = inputs.at(filled.name).shape.at(axis);
        if (length >= 0 && size != length) throw Error("input '" + filled.name + "' has another length than the others");
        length = size;
      }
    }
    return length;
  }

  Arrays RunIn(const Bucket& bucket, std::int64_t length, Arrays inputs) {
    for (const Filled& filled : variant_.filled)
      for (const std::size_t axis : filled.axes)
        inputs[filled.name] = internal::Window(inputs[filled.name], axis, 0, bucket.size, filled.element);
    Arrays outputs = RunArrays(ort_, Open(bucket), variant_, inputs);
    for (const Filled& cut : variant_.cut)
      for (const std::size_t axis : cut.axes) {
        const auto found = outputs.find(cut.name);
        if (found == outputs.end() || axis >= found->second.shape.size()) continue;
        const std::int64_t kept = (length * found->second.shape[axis] + bucket.size - 1) / bucket.size;
        found->second = internal::Window(found->second, axis, 0, kept);
      }
    return outputs;
  }

  const Session& Open(const Bucket& bucket) {
    const auto found = sessions_.find(bucket.size);
    if (found != sessions_.end()) return found->second;
    OpenOptions how = how_;
    how.model = bucket.file;
    return sessions_.emplace(bucket.size, OpenSession(ort_, variant_, folder_, how)).first->second;
  }

  const Ort& ort_;
  const Variant& variant_;
  std::string folder_;
  OpenOptions how_;
  std::map<std::int64_t, Session> sessions_;
};

// Runs a model with state, as a KV cache, step by step: what a step gives of it goes into the next. An output that is
// longer than the input it feeds gives its last rows, one that is shorter is appended, and the oldest rows go.
class Stepper {
 public:
  Stepper(const Ort& ort, const Session& session, const Variant& variant)
      : ort_(ort), session_(session), variant_(variant) {
    Reset();
  }

  // Begins a sequence, with zeros where `state` has no array for an input.
  void Reset(const Arrays& state = {}) {
    state_.clear();
    for (const auto& [name, output] : variant_.feeds) {
      const Tensor& tensor = Find(name);
      state_[name] = {tensor.dtype, tensor.shape,
                      std::vector<char>(CountElements(tensor) * FindDtype(tensor.dtype).bytes, 0)};
    }
    for (const auto& [name, array] : state) state_[name] = array;
  }

  // Returns the outputs of the next step; `inputs` are those that hold no state.
  Arrays Run(Arrays inputs) {
    for (const auto& [name, array] : state_) inputs.emplace(name, array);
    Arrays outputs = RunArrays(ort_, session_, variant_, inputs);
    for (const auto& [name, output] : variant_.feeds) {
      const auto found = outputs.find(output);
      if (found == outputs.end()) throw Error("output '" + output + "' has no fixed shape, and cannot be fed back");
      state_[name] = FeedBack(Find(name), state_[name], found->second);
    }
    return outputs;
  }

 private:
  const Tensor& Find(const std::string& name) const {
    for (const Tensor& tensor : variant_.inputs)
      if (tensor.name == name) return tensor;
    throw Error("there is no input '" + name + "'");
  }

  static Array FeedBack(const Tensor& input, const Array& held, Array made) {
    for (std::size_t axis = 0; axis < input.shape.size(); ++axis) {
      const std::int64_t size = input.shape[axis];
      if (made.shape[axis] < size) made = internal::Join(held, made, axis);
      if (made.shape[axis] > size) made = internal::Window(made, axis, made.shape[axis] - size, size);
    }
    return made;
  }

  const Ort& ort_;
  const Session& session_;
  const Variant& variant_;
  Arrays state_;
};

}  // namespace edgekit
