// The optimizer steps, written once over the words that each instruction set brings: Vector of kWidth numbers, kVectors
// of them at a time, HalfVector of as many 16-bit numbers, load, join, store, broadcast, the operators, negate, root,
// multiply_add, round_bf16, round_fp16, split, fence, and those of update_moments.h. Included by one file for each set,
// which is compiled for it; nothing in here may be visible to the linker under a common name.
#include <cstring>
#include <initializer_list>

#include "number_formats.h"
#include "updates.h"

namespace zerostd {
namespace {

// A rule is in two parts, so that torch's own root can be called between them.
struct Quotient {
  Vector dividend;
  Vector square;
};

// Of torch/optim/adam.py, _single_tensor_adam: lerp_, mul_ and addcmul_, sqrt, div, add_, addcdiv_.
struct Adam {
  static constexpr bool kHasRoot = true;
  static constexpr int kNumStates = 2;
  const Vector rate, decay_factor, average_part, old_part, square_part, correction, eps;
  const bool decoupled, from_gradient;

  ZS_INLINE explicit Adam(const zs_step& step)
      : rate(broadcast(step.rate)),
        decay_factor(broadcast(step.decay_factor)),
        average_part(broadcast(is_small(step.new_part) ? step.new_part : step.new_part - 1.0f)),
        old_part(broadcast(step.old_part)),
        square_part(broadcast(step.square_part)),
        correction(broadcast(step.correction)),
        eps(broadcast(step.eps)),
        decoupled(step.decay == ZS_DECOUPLED),
        from_gradient(!is_small(step.new_part)) {}

  // torch interpolates from the nearer end
  ZS_INLINE static bool is_small(float part) { return -0.5f < part && part < 0.5f; }

  // The new states; what the root is taken of, and what is divided by it.
  ZS_INLINE Quotient prepare(Vector gradient, Vector* states) const {
    states[0] = multiply_add(average_part, gradient - states[0], from_gradient ? gradient : states[0]);
    states[1] = multiply_add(square_part * gradient, gradient, states[1] * old_part);
    return {states[0], states[1]};
  }

  ZS_INLINE Vector finish(Vector master, Vector dividend, Vector root) const {
    if (decoupled) master = master * decay_factor;
    return master + rate * dividend / (root / correction + eps);
  }
};

// Of torch/optim/sgd.py, _single_tensor_sgd: mul_ and add_ with alpha.
struct Sgd {
  static constexpr bool kHasRoot = false;
  static constexpr int kNumStates = 0;
  const Vector rate;

  ZS_INLINE explicit Sgd(const zs_step& step) : rate(broadcast(step.rate)) {}

  ZS_INLINE Quotient prepare(Vector gradient, Vector*) const { return {gradient, gradient}; }

  ZS_INLINE Vector finish(Vector master, Vector dividend, Vector) const { return multiply_add(rate, dividend, master); }
};

struct SgdWithMomentum {
  static constexpr bool kHasRoot = false;
  static constexpr int kNumStates = 1;
  const Vector rate, new_part, old_part;
  const bool is_first, nesterov;

  ZS_INLINE explicit SgdWithMomentum(const zs_step& step)
      : rate(broadcast(step.rate)),
        new_part(broadcast(step.new_part)),
        old_part(broadcast(step.old_part)),
        is_first(step.momentum == ZS_FIRST),
        nesterov(step.nesterov != 0) {}

  ZS_INLINE Quotient prepare(Vector gradient, Vector* states) const {
    states[0] = is_first ? gradient : multiply_add(new_part, gradient, states[0] * old_part);
    return {nesterov ? multiply_add(old_part, states[0], gradient) : states[0], gradient};
  }

  ZS_INLINE Vector finish(Vector master, Vector dividend, Vector) const { return multiply_add(rate, dividend, master); }
};

// Of torch/optim/adagrad.py, _single_tensor_adagrad: addcmul_, sqrt, add_, addcdiv_.
struct Adagrad {
  static constexpr bool kHasRoot = true;
  static constexpr int kNumStates = 1;
  const Vector rate, eps;

  ZS_INLINE explicit Adagrad(const zs_step& step) : rate(broadcast(step.rate)), eps(broadcast(step.eps)) {}

  ZS_INLINE Quotient prepare(Vector gradient, Vector* states) const {
    states[0] = multiply_add(gradient, gradient, states[0]);
    return {gradient, states[0]};
  }

  ZS_INLINE Vector finish(Vector master, Vector dividend, Vector root) const {
    return master + rate * dividend / (root + eps);
  }
};

template <typename T>
ZS_INLINE T* at(void* data, int64_t index) {
  return static_cast<T*>(data) + index;
}

template <typename T>
ZS_INLINE const T* at(const void* data, int64_t index) {
  return static_cast<const T*>(data) + index;
}

constexpr int64_t kStride = kWidth * kVectors;
constexpr int64_t kRootBlock = 1024;  // elements; 4 KiB a buffer

template <typename T, typename Stored>
ZS_INLINE void store_all(T* to, const Stored (&values)[kVectors], bool stream) {
  for (int64_t v = 0; v < kVectors; ++v) store(to + v * kWidth, values[v], stream);
}

ZS_INLINE void write_master(const zs_arrays& target, int64_t i, const Vector (&master)[kVectors], bool stream) {
  if (!target.low) return store_all(at<float>(target.master, i), master, stream);
  HalfVector high[kVectors], low[kVectors];
  for (int64_t v = 0; v < kVectors; ++v) split(master[v], high + v, low + v);
  store_all(at<uint16_t>(target.master, i), high, stream);
  store_all(at<uint16_t>(target.low, i), low, stream);
}

ZS_INLINE void write_weight(const zs_step& step, int64_t i, const Vector (&master)[kVectors], bool stream) {
  if (step.weight_dtype == ZS_FLOAT32) return store_all(at<float>(step.weight, i), master, stream);
  HalfVector halves[kVectors];
  for (int64_t v = 0; v < kVectors; ++v) {
    halves[v] = step.weight_dtype == ZS_BFLOAT16 ? round_bf16(master[v]) : round_fp16(master[v]);
  }
  store_all(at<uint16_t>(step.weight, i), halves, stream);
}

ZS_INLINE Vector load_master(const zs_arrays& source, int64_t i) {
  return source.low ? join(at<uint16_t>(source.master, i), at<int16_t>(source.low, i))
                    : load(at<float>(source.master, i));
}

// One rule on one dtype of gradients. All reads of an element come before its writes: the targets may be the sources,
// and the weight the gradient.
template <typename Rule, typename Gradient>
struct Update {
  const zs_step& step;
  const Stream stream;
  const Rule rule{step};
  const Vector factor = broadcast(step.factor), coupled = broadcast(step.decay_factor);
  const bool has_factor = step.factor != 1.0f, maximize = step.maximize != 0, is_coupled = step.decay == ZS_COUPLED;
  const bool reads_states = step.momentum != ZS_FIRST;

  // Reads a stride, but for what finish reads; writes its states.
  ZS_INLINE void prepare(int64_t i, Quotient (&quotients)[kVectors]) const {
    Vector states[2][kVectors];
    for (int64_t v = 0, j = i; v < kVectors; ++v, j += kWidth) {
      Vector gradient = load(at<Gradient>(step.gradient, j));
      if (has_factor) gradient = gradient * factor;
      if (maximize) gradient = negate(gradient);
      if (is_coupled) gradient = multiply_add(coupled, load_master(step.source, j), gradient);
      Vector own[2] = {gradient, gradient};
      for (int s = 0; s < Rule::kNumStates; ++s) {
        if (reads_states) own[s] = load(at<float>(step.source.states[s], j));
      }
      quotients[v] = rule.prepare(gradient, own);
      for (int s = 0; s < Rule::kNumStates; ++s) states[s][v] = own[s];
    }
    for (int s = 0; s < Rule::kNumStates; ++s) {
      store_all(at<float>(step.target.states[s], i), states[s], stream.target);
    }
  }

  ZS_INLINE void finish(int64_t i, const Quotient (&quotients)[kVectors]) const {
    Vector master[kVectors];
    for (int64_t v = 0, j = i; v < kVectors; ++v, j += kWidth) {
      master[v] = rule.finish(load_master(step.source, j), quotients[v].dividend, quotients[v].square);
    }
    write_master(step.target, i, master, stream.target);
    if (step.weight) write_weight(step, i, master, stream.weight);
  }

  // With the processor's root: a stride at a time.
  ZS_INLINE void run(int64_t begin, int64_t end) const {
    Quotient quotients[kVectors];
    for (int64_t i = begin; i < end; i += kStride) {
      prepare(i, quotients);
      if constexpr (Rule::kHasRoot) {
        for (Quotient& quotient : quotients) quotient.square = root(quotient.square);
      }
      finish(i, quotients);
    }
  }

  // With a root that is called: a block at a time, which stays in the L1 cache meanwhile.
  ZS_INLINE void run_blocks(int64_t begin, int64_t end) const {
    alignas(64) float dividends[kRootBlock], squares[kRootBlock];
    Quotient quotients[kVectors];
    for (int64_t from = begin; from < end; from += kRootBlock) {
      const int64_t count = end - from < kRootBlock ? end - from : kRootBlock;
      for (int64_t i = 0; i < count; i += kStride) {
        prepare(from + i, quotients);
        for (int64_t v = 0; v < kVectors; ++v) {
          store(dividends + i + v * kWidth, quotients[v].dividend);
          store(squares + i + v * kWidth, quotients[v].square);
        }
      }
      step.root(static_cast<int32_t>(count), squares, squares, step.root_mode);
      for (int64_t i = 0; i < count; i += kStride) {
        for (int64_t v = 0; v < kVectors; ++v) {
          quotients[v] = {load(dividends + i + v * kWidth), load(squares + i + v * kWidth)};
        }
        finish(from + i, quotients);
      }
    }
  }
};

template <typename Rule, typename Gradient>
void update_with(const zs_step& step, int64_t begin, int64_t end, Stream stream) {
  const Update<Rule, Gradient> update{step, stream};
  if (Rule::kHasRoot && step.root) {
    update.run_blocks(begin, end);
  } else {
    update.run(begin, end);
  }
}

template <typename Rule>
ZS_INLINE void update_by(const zs_step& step, int64_t begin, int64_t end, Stream stream) {
  switch (step.gradient_dtype) {
    case ZS_FLOAT32: return update_with<Rule, float>(step, begin, end, stream);
    case ZS_BFLOAT16: return update_with<Rule, BFloat16>(step, begin, end, stream);
    case ZS_FLOAT16: return update_with<Rule, Float16>(step, begin, end, stream);
  }
}

void update_whole(const zs_step& step, int64_t begin, int64_t end, Stream stream) {
  switch (step.rule) {
    case ZS_ADAM: return update_by<Adam>(step, begin, end, stream);
    case ZS_SGD:
      return step.momentum == ZS_NO_MOMENTUM ? update_by<Sgd>(step, begin, end, stream)
                                             : update_by<SgdWithMomentum>(step, begin, end, stream);
    case ZS_ADAGRAD: return update_by<Adagrad>(step, begin, end, stream);
  }
}

// The last elements, fewer than a stride, in a copy that is as long as one.
struct Remainder {
  static constexpr int64_t kItems = kStride;
  struct Array {
    void* original;
    int64_t size;  // of all elements, in bytes
    alignas(64) unsigned char bytes[kItems * 4];
  };
  Array arrays[11];
  int num_arrays = 0;

  // A copy of count elements that begin at begin.
  ZS_INLINE void* take(const void* data, int64_t begin, int64_t count, int64_t item_size, bool is_read) {
    if (!data) return nullptr;
    Array& array = arrays[num_arrays++];
    array.original = static_cast<unsigned char*>(const_cast<void*>(data)) + begin * item_size;
    array.size = count * item_size;
    std::memset(array.bytes, 0, sizeof array.bytes);
    if (is_read) std::memcpy(array.bytes, array.original, static_cast<size_t>(array.size));
    return array.bytes;
  }

  ZS_INLINE zs_arrays take(const zs_arrays& from, int64_t begin, int64_t count, bool is_read) {
    return {take(from.master, begin, count, from.low ? 2 : 4, is_read),
            take(from.low, begin, count, 2, is_read),
            {take(from.states[0], begin, count, 4, is_read), take(from.states[1], begin, count, 4, is_read)}};
  }
};

ZS_INLINE void update_remainder(const zs_step& step, int64_t begin, int64_t count) {
  Remainder remainder;
  zs_step copy = step;
  copy.gradient = remainder.take(step.gradient, begin, count, step.gradient_dtype == ZS_FLOAT32 ? 4 : 2, true);
  copy.source = remainder.take(step.source, begin, count, true);
  const int num_read = remainder.num_arrays;
  copy.target = remainder.take(step.target, begin, count, false);
  copy.weight = remainder.take(step.weight, begin, count, step.weight_dtype == ZS_FLOAT32 ? 4 : 2, false);
  update_whole(copy, 0, kStride, {false, false});
  for (int i = num_read; i < remainder.num_arrays; ++i) {
    Remainder::Array& array = remainder.arrays[i];
    std::memcpy(array.original, array.bytes, static_cast<size_t>(array.size));
  }
}

#include "update_moments.h"

ZS_INLINE void update_fp32(const zs_step& step, int64_t begin, int64_t end, Stream stream) {
  const int64_t whole = begin + (end - begin) / kStride * kStride;
  update_whole(step, begin, whole, stream);
  if (whole < end) update_remainder(step, whole, end - whole);
}

ZS_INLINE void update_all(const zs_step& step, int64_t begin, int64_t end, Stream stream) {
  switch (step.codec) {
    case ZS_NO_CODEC: update_fp32(step, begin, end, stream); break;
    case ZS_INT8: update_moments<Int8Moments>(step, begin, end, stream); break;
    case ZS_BF16: update_moments<Bf16Moments>(step, begin, end, stream); break;
  }
  if (stream.target || stream.weight) fence();
}

}  // namespace
}  // namespace zerostd
