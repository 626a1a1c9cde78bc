// The step of Adam on moments that are kept in fewer bytes (codec in zerostd_native.h): decoded, updated and coded again
// in one pass. Included by update_vectors.h, whose words it uses beside absolute, smaller, larger, larger_bits,
// largest_bits, load_signed, load_unsigned and store_codes; and Bits, as many 32-bit integers as a Vector has numbers,
// with their operators, bits_of, numbers_of and upper_halves. No product is fused with a sum, so that every instruction set, a GPU
// and torch give the same bits.

constexpr int64_t kParts = ZS_CODED_BLOCK / kWidth;  // of a block, as Vectors

ZS_INLINE unsigned char* state_at(const zs_arrays& arrays, int state, int64_t byte) {
  return at<unsigned char>(arrays.states[state], byte);
}

// The bits of numbers: one NaN for all, and zero for what is subnormal.
ZS_INLINE Bits plain_bits(Vector value) {
  const Bits bits = bits_of(value), size = bits & 0x7FFFFFFFu, zero = bits ^ bits;
  const Bits number = size <= 0x007FFFFFu ? zero : bits;
  return value == value ? number : zero + 0x7FC00000u;
}

// Random bits for both moments of an element: every one depends on all bits of both, and of the step's key.
ZS_INLINE Bits noise_of(Bits average, Bits square, uint32_t key) {
  Bits bits = (square ^ (average << 16)) + key;
  bits = (bits ^ (bits >> 16)) * 0x21F0AAADu;
  bits = (bits ^ (bits >> 15)) * 0x735A2D97u;
  return bits ^ (bits >> 15);
}

// ZS_INT8: records of codes and a scale. Codes are rounded up or down at random.
struct Int8Moments {
  static constexpr int64_t kRecord = ZS_CODED_BLOCK + 4;  // bytes of a block
  const unsigned char *const averages, *const squares;
  const Vector average_scale = broadcast(read_scale(averages)), root_scale = broadcast(read_scale(squares));

  ZS_INLINE static int64_t bytes_of(int64_t) { return kRecord; }

  ZS_INLINE Vector average(int64_t part) const {
    const Vector code = load_signed(averages + part * kWidth);
    return code / (broadcast(254.0f) - absolute(code)) * average_scale;
  }

  ZS_INLINE Vector square(int64_t part) const {
    const Vector root = load_unsigned(squares + part * kWidth) * broadcast(1.0f / 255.0f) * root_scale;
    return root * root;
  }

  ZS_INLINE static float read_scale(const unsigned char* codes) {
    float scale;
    std::memcpy(&scale, codes + ZS_CODED_BLOCK, sizeof scale);
    return scale;
  }

  ZS_INLINE static void write(unsigned char* averages, unsigned char* squares, const Vector (&average)[kParts],
                              const Vector (&square)[kParts], const Vector (&roots)[kParts], uint32_t key, bool) {
    Bits noise[kParts];
    for (int64_t p = 0; p < kParts; ++p) noise[p] = noise_of(plain_bits(average[p]), plain_bits(square[p]), key);
    Vector largest_average = broadcast(0.0f), largest_root = broadcast(0.0f);
    for (int64_t p = 0; p < kParts; ++p) {
      largest_average = larger_bits(largest_average, absolute(average[p]));
      largest_root = larger_bits(largest_root, absolute(roots[p]));
    }
    write_averages(averages, average, noise, scale_of(largest_bits(largest_average), 0x1.0p-100f));
    write_roots(squares, roots, noise, scale_of(largest_bits(largest_root), 0x1.0p-54f));
  }

  // The largest magnitude of a block, by its bits. NaN from 2^126 on, where sums may overflow, and if a number is not
  // finite. 0 below `least`: the block has no codes.
  ZS_INLINE static float scale_of(uint32_t largest, float least) {
    if (largest >= 0x7E800000u) return float_of(0x7FC00000u);
    return float_of(largest) < least ? 0.0f : float_of(largest);
  }

  // Whether there are codes to be written behind the scale.
  ZS_INLINE static bool write_scale(unsigned char* codes, float scale) {
    std::memcpy(codes + ZS_CODED_BLOCK, &scale, sizeof scale);
    if (scale > 0.0f) return true;
    std::memset(codes, 0, ZS_CODED_BLOCK);
    return false;
  }

  // From 15 random bits: a number between -1/2 and 1/2, and neither of these.
  ZS_INLINE static Vector shift_of(Bits noise) {
    return numbers_of(noise + noise + 1u) * broadcast(0x1.0p-16f) - broadcast(0.5f);
  }

  ZS_INLINE static void write_averages(unsigned char* codes, const Vector (&average)[kParts],
                                       const Bits (&noise)[kParts], float scale) {
    if (!write_scale(codes, scale)) return;
    for (int64_t p = 0; p < kParts; ++p) {
      const Vector part = average[p] / (broadcast(scale) + absolute(average[p]));
      store_codes(codes + p * kWidth, part * broadcast(254.0f) + shift_of((noise[p] & 0xFFFFu) >> 1));
    }
  }

  // A root above zero never becomes zero, which would divide by eps alone.
  ZS_INLINE static void write_roots(unsigned char* codes, const Vector (&roots)[kParts], const Bits (&noise)[kParts],
                                    float scale) {
    if (!write_scale(codes, scale)) return;
    const Vector per_code = broadcast(255.0f / scale);
    for (int64_t p = 0; p < kParts; ++p) {
      const Vector least = smaller(roots[p] * broadcast(0x1.0p120f), broadcast(1.0f));
      store_codes(codes + p * kWidth, larger(roots[p] * per_code + shift_of(noise[p] >> 17), least));
    }
  }
};

// ZS_BF16: numbers, rounded up or down at random, by a hash of them.
struct Bf16Moments {
  static constexpr int64_t kRecord = ZS_CODED_BLOCK * 2;
  const unsigned char *const averages, *const squares;

  ZS_INLINE static int64_t bytes_of(int64_t count) { return count * 2; }

  ZS_INLINE static Vector load_part(const unsigned char* numbers, int64_t part) {
    return load(reinterpret_cast<const BFloat16*>(numbers) + part * kWidth);
  }

  ZS_INLINE Vector average(int64_t part) const { return load_part(averages, part); }
  ZS_INLINE Vector square(int64_t part) const { return load_part(squares, part); }

  ZS_INLINE static void write(unsigned char* averages, unsigned char* squares, const Vector (&average)[kParts],
                              const Vector (&square)[kParts], const Vector (&)[kParts], uint32_t key, bool stream) {
    for (int64_t p = 0; p < kParts; ++p) {
      const Bits a = plain_bits(average[p]), s = plain_bits(square[p]);
      const Bits noise = noise_of(a, s, key);
      store(reinterpret_cast<uint16_t*>(averages) + p * kWidth, upper_halves(a + (noise & 0xFFFFu)), stream);
      store(reinterpret_cast<uint16_t*>(squares) + p * kWidth, upper_halves(s + (noise >> 16)), stream);
    }
  }
};

template <typename Moments, typename Gradient>
struct CodedAdam {
  const zs_step& step;
  const Stream stream;
  const Vector factor = broadcast(step.factor), decay_factor = broadcast(step.decay_factor);
  const Vector rate = broadcast(step.rate), eps = broadcast(step.eps), new_part = broadcast(step.new_part);
  const Vector old_part = broadcast(step.old_part), square_part = broadcast(step.square_part);
  const bool has_factor = step.factor != 1.0f, maximize = step.maximize != 0;
  const bool is_coupled = step.decay == ZS_COUPLED, is_decoupled = step.decay == ZS_DECOUPLED;

  ZS_INLINE void run(int64_t begin, int64_t end) const {
    for (int64_t i = begin; i < end; i += ZS_CODED_BLOCK) run_block(i);
  }

  ZS_INLINE void run_block(int64_t begin) const {
    const int64_t record = begin / ZS_CODED_BLOCK * Moments::kRecord;
    const Moments old{state_at(step.source, 0, record), state_at(step.source, 1, record)};
    Vector average[kParts], squares[kParts], roots[kParts];
    for (int64_t part = 0; part < kParts; part += kVectors) {
      const int64_t first = begin + part * kWidth;
      Vector master[kVectors];
      for (int64_t v = 0; v < kVectors; ++v) {
        const int64_t i = first + v * kWidth, p = part + v;
        master[v] = load_master(step.source, i);
        Vector gradient = load(at<Gradient>(step.gradient, i));
        if (has_factor) gradient = gradient * factor;
        if (maximize) gradient = negate(gradient);
        if (is_coupled) gradient = gradient + master[v] * decay_factor;
        const Vector old_average = old.average(p);
        average[p] = old_average + (gradient - old_average) * new_part;
        squares[p] = old.square(p) * old_part + gradient * square_part * gradient;
        roots[p] = root(squares[p]);
        if (is_decoupled) master[v] = master[v] * decay_factor;
        master[v] = master[v] + average[p] * rate / (roots[p] + eps);
      }
      write_master(step.target, first, master, stream.target);
      if (step.weight) write_weight(step, first, master, stream.weight);
    }
    Moments::write(state_at(step.target, 0, record), state_at(step.target, 1, record), average, squares, roots, step.key,
                   stream.target);
  }
};

// The last elements, fewer than a block, in copies that are as long as one.
template <typename Moments, typename Gradient>
ZS_INLINE void update_last_block(const zs_step& step, int64_t begin, int64_t count) {
  alignas(64) unsigned char gradient[ZS_CODED_BLOCK * 4] = {}, master[ZS_CODED_BLOCK * 4] = {};
  alignas(64) unsigned char low[ZS_CODED_BLOCK * 2] = {}, weight[ZS_CODED_BLOCK * 4] = {};
  alignas(64) unsigned char states[2][Moments::kRecord] = {};
  const int64_t master_size = step.source.low ? 2 : 4, weight_size = step.weight_dtype == ZS_FLOAT32 ? 4 : 2;
  const int64_t record = begin / ZS_CODED_BLOCK * Moments::kRecord;
  const size_t master_bytes = static_cast<size_t>(count * master_size), low_bytes = static_cast<size_t>(count * 2);
  const size_t state_bytes = static_cast<size_t>(Moments::bytes_of(count));
  std::memcpy(gradient, at<Gradient>(step.gradient, begin), static_cast<size_t>(count) * sizeof(Gradient));
  std::memcpy(master, at<unsigned char>(step.source.master, begin * master_size), master_bytes);
  if (step.source.low) std::memcpy(low, at<unsigned char>(step.source.low, begin * 2), low_bytes);
  for (int s = 0; s < 2; ++s) std::memcpy(states[s], state_at(step.source, s, record), state_bytes);
  zs_step copy = step;
  copy.gradient = gradient;
  copy.weight = step.weight ? weight : nullptr;
  copy.source = copy.target = {master, step.source.low ? low : nullptr, {states[0], states[1]}};
  CodedAdam<Moments, Gradient>{copy, {false, false}}.run_block(0);
  std::memcpy(at<unsigned char>(step.target.master, begin * master_size), master, master_bytes);
  if (step.target.low) std::memcpy(at<unsigned char>(step.target.low, begin * 2), low, low_bytes);
  for (int s = 0; s < 2; ++s) std::memcpy(state_at(step.target, s, record), states[s], state_bytes);
  if (!step.weight) return;
  std::memcpy(at<unsigned char>(step.weight, begin * weight_size), weight, static_cast<size_t>(count * weight_size));
}

template <typename Moments, typename Gradient>
void update_moments_with(const zs_step& step, int64_t begin, int64_t end, Stream stream) {
  const int64_t whole = begin + (end - begin) / ZS_CODED_BLOCK * ZS_CODED_BLOCK;
  CodedAdam<Moments, Gradient>{step, stream}.run(begin, whole);
  if (whole < end) update_last_block<Moments, Gradient>(step, whole, end - whole);
}

template <typename Moments>
ZS_INLINE void update_moments(const zs_step& step, int64_t begin, int64_t end, Stream stream) {
  switch (step.gradient_dtype) {
    case ZS_FLOAT32: return update_moments_with<Moments, float>(step, begin, end, stream);
    case ZS_BFLOAT16: return update_moments_with<Moments, BFloat16>(step, begin, end, stream);
    case ZS_FLOAT16: return update_moments_with<Moments, Float16>(step, begin, end, stream);
  }
}
