import Foundation

#if canImport(OnnxRuntimeBindings)
import OnnxRuntimeBindings
#else
import onnxruntime_objc
#endif

/// Compares what a session makes of the golden samples with what the float model made of them.
struct SelfTest {
    let bundle: ModelBundle
    let folder: URL

    func run(_ session: ORTSession) throws -> [String] {
        let whole = bundle.judgedByFloat, own = "golden/expected.npz"
        let inputs = try rows("\(bundle.golden)/inputs.npz", bundle.inputs, bundle.samples)
        let expected = try bundle.chosen.isEmpty ? [:] : rows(own, bundle.outputs, bundle.chosen.count)
        let wanted = try whole ? rows("\(bundle.golden)/outputs.npz", bundle.outputs, bundle.samples) : expected
        var sums = Dictionary(uniqueKeysWithValues: bundle.outputs.map { ($0.name, Sums()) })
        var failures: [String] = []
        for index in 0..<bundle.samples {
            let place = bundle.chosen.firstIndex(of: index)
            if !whole && place == nil { continue } // a sample of another bundle's self-test
            var fed: [String: ORTValue] = [:]
            for tensor in bundle.inputs {
                let row = slice(inputs[tensor.name]!, tensor, index)
                let data = NSMutableData(data: row)
                let shape = tensor.shape.map { NSNumber(value: $0) }
                fed[tensor.name] = try ORTValue(tensorData: data, elementType: try Dtype.find(tensor).ort, shape: shape)
            }
            let names = Set(bundle.outputs.map(\.name))
            let got = try session.run(withInputs: fed, outputNames: names, runOptions: nil)
            for tensor in bundle.outputs {
                let dtype = try Dtype.find(tensor)
                let data = Data(referencing: try got[tensor.name]!.tensorData())
                guard data.count == tensor.count * dtype.bytes else {
                    throw LoaderError("output '\(tensor.name)' has another size than the bundle says")
                }
                let row = whole ? index : place!
                sums[tensor.name]!.add(slice(wanted[tensor.name]!, tensor, row), data, tensor, dtype)
                if let place {
                    let should = slice(expected[tensor.name]!, tensor, place)
                    failures += compare(tensor, dtype, should, data, index)
                }
            }
        }
        for tensor in bundle.outputs {
            failures += sums[tensor.name]!.judge(tensor, try Dtype.find(tensor), bundle)
        }
        return failures
    }

    private func compare(_ tensor: ModelTensor, _ dtype: Dtype, _ should: Data, _ got: Data, _ row: Int) -> [String] {
        guard let limit = bundle.tolerance.first(where: { $0.name == tensor.name })?.value else { return [] }
        let distance = (0..<tensor.count).map { abs(dtype.read(should, $0) - dtype.read(got, $0)) }.max() ?? 0
        if distance <= limit { return [] }
        return ["output '\(tensor.name)' of sample \(row) is off by \(distance), at most \(limit)"]
    }

    private func slice(_ rows: Data, _ tensor: ModelTensor, _ index: Int) -> Data {
        let size = rows.count / rowCount(rows, tensor)
        return rows.subdata(in: index * size..<(index + 1) * size)
    }

    private func rowCount(_ rows: Data, _ tensor: ModelTensor) -> Int {
        guard let dtype = try? Dtype.find(tensor), tensor.count > 0 else { return 1 }
        return max(1, rows.count / (tensor.count * dtype.bytes))
    }

    /// Reads the rows of each tensor from an .npz, which is a zip of .npy files that are stored, not compressed.
    private func rows(_ name: String, _ tensors: [ModelTensor], _ count: Int) throws -> [String: Data] {
        let file = folder.appendingPathComponent(name)
        let data = try Data(contentsOf: file)
        var entries: [String: Data] = [:]
        var at = 0
        while number(data, at, 4) == 0x0403_4b50 {
            let nameSize = number(data, at + 26, 2), extraSize = number(data, at + 28, 2)
            let extra = at + 30 + nameSize, begin = extra + extraSize
            guard number(data, at + 6, 2) & 8 == 0, number(data, at + 8, 2) == 0 else {
                throw LoaderError("'\(file.lastPathComponent)' is compressed")
            }
            var size = number(data, at + 22, 4)
            if size == 0xffff_ffff, number(data, extra, 2) == 1 { size = number(data, extra + 4, 8) }
            guard begin <= data.count, size <= data.count - begin else {
                throw LoaderError("'\(file.lastPathComponent)' is cut off")
            }
            let name = String(decoding: data.subdata(in: at + 30..<extra), as: UTF8.self)
            entries[name] = data.subdata(in: begin..<begin + size)
            at = begin + size
        }
        var found: [String: Data] = [:]
        for tensor in tensors {
            let dtype = try Dtype.find(tensor)
            guard let entry = entries["\(tensor.name).npy"], entry.count > 10 else {
                throw LoaderError("'\(file.lastPathComponent)' lacks '\(tensor.name)'")
            }
            let header = 10 + number(entry, 8, 2)
            let text = String(decoding: entry.prefix(header), as: UTF8.self)
            guard entry.count - header == count * tensor.count * dtype.bytes, text.contains(dtype.numpy) else {
                throw LoaderError("the golden samples of '\(tensor.name)' are not \(count) rows")
            }
            found[tensor.name] = entry.subdata(in: header..<entry.count)
        }
        return found
    }

    private func number(_ data: Data, _ at: Int, _ bytes: Int) -> Int {
        guard at >= 0, at + bytes <= data.count else { return 0 }
        return (0..<bytes).reversed().reduce(0) { $0 << 8 | Int(data[data.startIndex + at + $1]) }
    }
}

/// An element type: its name in numpy, its size, and if distances between its values mean something.
struct Dtype {
    let ort: ORTTensorElementDataType
    let numpy: String
    let bytes: Int
    let numeric: Bool

    static func find(_ tensor: ModelTensor) throws -> Dtype {
        switch tensor.dtype {
        case "float32": return Dtype(ort: .float, numpy: "<f4", bytes: 4, numeric: true)
        case "int8": return Dtype(ort: .int8, numpy: "|i1", bytes: 1, numeric: true)
        case "uint8": return Dtype(ort: .uInt8, numpy: "|u1", bytes: 1, numeric: true)
        case "int32": return Dtype(ort: .int32, numpy: "<i4", bytes: 4, numeric: false)
        case "int64": return Dtype(ort: .int64, numpy: "<i8", bytes: 8, numeric: false)
        default: throw LoaderError("tensors of \(tensor.dtype) have no self-test in Swift")
        }
    }

    /// Reads an element; wider integers are only compared.
    func read(_ data: Data, _ index: Int) -> Double {
        data.withUnsafeBytes { raw in
            switch numpy {
            case "<f4": return Double(raw.loadUnaligned(fromByteOffset: index * bytes, as: Float.self))
            case "|i1": return Double(raw.loadUnaligned(fromByteOffset: index, as: Int8.self))
            case "|u1": return Double(raw.loadUnaligned(fromByteOffset: index, as: UInt8.self))
            case "<i4": return Double(raw.loadUnaligned(fromByteOffset: index * bytes, as: Int32.self))
            default: return Double(raw.loadUnaligned(fromByteOffset: index * bytes, as: Int64.self))
            }
        }
    }
}

/// The sums of one output over all samples, from which the metrics follow.
struct Sums {
    private var samples = 0.0, elements = 0.0, matches = 0.0, faulty = 0.0
    private var dot = 0.0, wanted = 0.0, got = 0.0, error = 0.0, ranked = 0.0, agreed = 0.0

    mutating func add(_ should: Data, _ found: Data, _ tensor: ModelTensor, _ dtype: Dtype) {
        var best = -Double.infinity, top = -Double.infinity, topWanted = -Double.infinity
        samples += 1
        elements += Double(tensor.count)
        for index in 0..<tensor.count {
            let want = dtype.read(should, index), have = dtype.read(found, index)
            matches += want == have ? 1 : 0
            guard dtype.numeric else { continue }
            faulty += want.isFinite && have.isFinite ? 0 : 1
            dot += want * have
            wanted += want * want
            got += have * have
            error += (have - want) * (have - want)
            best = max(best, want)
            if have > top {
                top = have
                topWanted = want
            }
        }
        guard dtype.numeric, tensor.count > 1, tensor.shape.contains(tensor.count) else { return }
        ranked += 1
        agreed += topWanted >= best ? 1 : 0
    }

    func judge(_ tensor: ModelTensor, _ dtype: Dtype, _ bundle: ModelBundle) -> [String] {
        guard elements > 0, faulty == 0 else {
            return ["output '\(tensor.name)' has \(Int(faulty)) values that are NaN or infinite"]
        }
        var shares: [(what: String, value: Double, least: Double)] = []
        if dtype.numeric {
            let norm = wanted.squareRoot() * got.squareRoot()
            shares.append(("cosine", norm > 0 ? dot / norm : (wanted == got ? 1 : 0), bundle.minCosine))
            shares.append(("SQNR in dB", decibels(wanted, error), bundle.minSqnrDb))
        } else {
            shares.append(("exact match", matches / elements, bundle.minTop1Agreement))
        }
        if ranked > 0 {
            shares.append(("top-1 agreement", agreed / ranked, bundle.minTop1Agreement - bundle.grantedSamples / samples))
        }
        return shares.filter { $0.value < $0.least }.map {
            "output '\(tensor.name)': \($0.what) \($0.value), least \($0.least)"
        }
    }

    private func decibels(_ signal: Double, _ noise: Double) -> Double {
        if noise <= 0 { return 200 }
        return signal <= 0 ? -200 : max(-200, min(200, 10 * log10(signal / noise)))
    }
}
