import Foundation

#if canImport(OnnxRuntimeBindings)
import OnnxRuntimeBindings
#else
import onnxruntime_objc
#endif

/// A tensor: the type and shape of its numbers, and their bytes, the last axis first.
public struct ModelArray {
    /// numpy's name, such as "float32"
    public let dtype: String
    public let shape: [Int]
    public let bytes: Data

    public init(dtype: String, shape: [Int], bytes: Data) {
        self.dtype = dtype
        self.shape = shape
        self.bytes = bytes
    }

    public init(_ values: [Float], shape: [Int]) {
        self.init(dtype: "float32", shape: shape, bytes: values.withUnsafeBufferPointer { Data(buffer: $0) })
    }

    public init(_ values: [Int64], shape: [Int]) {
        self.init(dtype: "int64", shape: shape, bytes: values.withUnsafeBufferPointer { Data(buffer: $0) })
    }

    /// Returns the first `count` places of an axis; those beyond the end hold `fill`, the bytes of one element.
    func window(_ axis: Int, _ count: Int, _ fill: Data) -> ModelArray {
        let outer = shape[..<axis].reduce(1, *)
        let place = outer * shape[axis] == 0 ? 0 : bytes.count / (outer * shape[axis])
        let kept = min(count, shape[axis]) * place, size = shape[axis] * place
        let missing = max(0, count - shape[axis]) * (place / max(1, fill.count))
        var made = Data(capacity: outer * count * place)
        for row in 0..<outer {
            let begin = bytes.startIndex + row * size
            made.append(bytes.subdata(in: begin..<begin + kept))
            for _ in 0..<missing { made.append(fill) }
        }
        var sizes = shape
        sizes[axis] = count
        return ModelArray(dtype: dtype, shape: sizes, bytes: made)
    }
}

/// Runs samples of any length with a bundle that has models of several: each in the smallest that takes it.
///
/// Inputs are filled at their end up to that size, and outputs cut back. A session is opened when it is first needed.
/// Written like the loaders in C++, Java and Python, and never compiled where edgekit is made.
public final class Sizes {
    private let loader: ModelLoader
    private let bundle: ModelBundle
    private var sessions: [Int: ORTSession] = [:]

    public init(loader: ModelLoader, bundle: ModelBundle) {
        self.loader = loader
        self.bundle = bundle
    }

    /// Returns the outputs of a sample, as long as it is: those of types that the self-test knows.
    public func run(_ inputs: [String: ModelArray]) throws -> [String: ModelArray] {
        for tensor in bundle.inputs {
            guard let array = inputs[tensor.name] else { throw LoaderError("input '\(tensor.name)' is missing") }
            let size = array.shape.reduce(1, *) * (try Dtype.find(tensor).bytes)
            guard array.dtype == tensor.dtype, array.shape.count == tensor.shape.count, array.bytes.count == size else {
                throw LoaderError("input '\(tensor.name)' is no \(tensor.dtype) of \(tensor.shape.count) axes")
            }
        }
        let length = try measure(inputs)
        guard length > 0, let bucket = bundle.sizes.first(where: { $0.size >= length }) else {
            throw LoaderError("'\(bundle.name)' takes no sample of \(length)")
        }
        return try run(bucket, length, inputs)
    }

    private func measure(_ inputs: [String: ModelArray]) throws -> Int {
        var length = -1
        for filled in bundle.filled {
            for axis in filled.axes {
                let size = inputs[filled.name]!.shape[axis]
                guard length < 0 || size == length else {
                    throw LoaderError("input '\(filled.name)' has another length than the others")
                }
                length = size
            }
        }
        return length
    }

    private func run(_ bucket: ModelSize, _ length: Int, _ inputs: [String: ModelArray]) throws -> [String: ModelArray] {
        var given = inputs
        for filled in bundle.filled {
            let element = Data(filled.element.map { UInt8(bitPattern: $0) })
            for axis in filled.axes {
                given[filled.name] = given[filled.name]!.window(axis, bucket.size, element)
            }
        }
        var fed: [String: ORTValue] = [:]
        for tensor in bundle.inputs {
            let array = given[tensor.name]!
            let shape = array.shape.map { NSNumber(value: $0) }
            let data = NSMutableData(data: array.bytes)
            fed[tensor.name] = try ORTValue(tensorData: data, elementType: try Dtype.find(tensor).ort, shape: shape)
        }
        let names = Set(bundle.outputs.map(\.name))
        let got = try open(bucket).run(withInputs: fed, outputNames: names, runOptions: nil)
        var outputs: [String: ModelArray] = [:]
        for tensor in bundle.outputs {
            let value = got[tensor.name]!
            let shape = try value.tensorTypeAndShapeInfo().shape.map(\.intValue)
            let bytes = Data(referencing: try value.tensorData())
            outputs[tensor.name] = ModelArray(dtype: tensor.dtype, shape: shape, bytes: bytes)
        }
        for cut in bundle.cut {
            for axis in cut.axes {
                guard let output = outputs[cut.name] else { continue }
                let kept = (length * output.shape[axis] + bucket.size - 1) / bucket.size
                outputs[cut.name] = output.window(axis, kept, Data())
            }
        }
        return outputs
    }

    private func open(_ bucket: ModelSize) throws -> ORTSession {
        if let session = sessions[bucket.size] { return session }
        let session = try loader.open(bundle, model: bucket.file)
        sessions[bucket.size] = session
        return session
    }
}
