// The step of Adam on moments that are kept as codes of 8 bits (is_coded in zerostd_native.h): decoded, updated and coded
// again in one pass. Included by update_vectors.h, whose words it uses beside absolute, smaller, larger, larger_bits,
// largest_bits, load_signed, load_unsigned and store_codes. No product is fused with a sum, so that every instruction
// set, a GPU and torch give the same bits.

constexpr int64_t kRecord = ZS_CODED_BLOCK + 4;  // bytes: the codes of a block, and its scale

// The largest magnitude of a block, by its bits. NaN from 2^126 on, where sums may overflow, and if a number is not finite.
// 0 below `least`: the block has no codes.
ZS_INLINE float scale_of(uint32_t largest, float least) {
  if (largest >= 0x7E800000u) return float_of(0x7FC00000u);
  return float_of(largest) < least ? 0.0f : float_of(largest);
}

template <typename Gradient>
struct CodedAdam {
  static constexpr int64_t kParts = ZS_CODED_BLOCK / kWidth;
  const zs_step& step;
  const bool stream_target, stream_weight;
  const Vector factor = broadcast(step.factor), decay_factor = broadcast(step.decay_factor);
  const Vector rate = broadcast(step.rate), eps = broadcast(step.eps), new_part = broadcast(step.new_part);
  const Vector old_part = broadcast(step.old_part), square_part = broadcast(step.square_part);
  const bool has_factor = step.factor != 1.0f, maximize = step.maximize != 0;
  const bool is_coupled = step.decay == ZS_COUPLED, is_decoupled = step.decay == ZS_DECOUPLED;

  ZS_INLINE void run(int64_t begin, int64_t end) const {
    for (int64_t i = begin; i < end; i += ZS_CODED_BLOCK) run_block(i);
  }

  ZS_INLINE void run_block(int64_t begin) const {
    const int64_t record = begin / ZS_CODED_BLOCK * kRecord;
    const unsigned char* const averages = at<unsigned char>(step.source.states[0], record);
    const unsigned char* const squares = at<unsigned char>(step.source.states[1], record);
    const Vector average_scale = broadcast(read_scale(averages)), root_scale = broadcast(read_scale(squares));
    Vector average[kParts], roots[kParts];
    Vector largest_average = broadcast(0.0f), largest_root = broadcast(0.0f);
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
        const Vector code = load_signed(averages + p * kWidth);
        const Vector old_average = code / (broadcast(254.0f) - absolute(code)) * average_scale;
        const Vector old_root = load_unsigned(squares + p * kWidth) * broadcast(1.0f / 255.0f) * root_scale;
        average[p] = old_average + (gradient - old_average) * new_part;
        roots[p] = root(old_root * old_root * old_part + gradient * square_part * gradient);
        if (is_decoupled) master[v] = master[v] * decay_factor;
        master[v] = master[v] + average[p] * rate / (roots[p] + eps);
        largest_average = larger_bits(largest_average, absolute(average[p]));
        largest_root = larger_bits(largest_root, absolute(roots[p]));
      }
      write_master(step.target, first, master, stream_target);
      if (step.weight) write_weight(step, first, master, stream_weight);
    }
    write_averages(at<unsigned char>(step.target.states[0], record), average,
                   scale_of(largest_bits(largest_average), 0x1.0p-100f));
    write_roots(at<unsigned char>(step.target.states[1], record), roots,
                scale_of(largest_bits(largest_root), 0x1.0p-54f));
  }

  ZS_INLINE static float read_scale(const unsigned char* codes) {
    float scale;
    std::memcpy(&scale, codes + ZS_CODED_BLOCK, sizeof scale);
    return scale;
  }

  // Whether there are codes to be written behind the scale.
  ZS_INLINE static bool write_scale(unsigned char* codes, float scale) {
    std::memcpy(codes + ZS_CODED_BLOCK, &scale, sizeof scale);
    if (scale > 0.0f) return true;
    std::memset(codes, 0, ZS_CODED_BLOCK);
    return false;
  }

  ZS_INLINE static void write_averages(unsigned char* codes, const Vector (&average)[kParts], float scale) {
    if (!write_scale(codes, scale)) return;
    for (int64_t p = 0; p < kParts; ++p) {
      const Vector part = average[p] / (broadcast(scale) + absolute(average[p]));
      store_codes(codes + p * kWidth, part * broadcast(254.0f));
    }
  }

  // A root above zero never becomes zero, which would divide by eps alone.
  ZS_INLINE static void write_roots(unsigned char* codes, const Vector (&roots)[kParts], float scale) {
    if (!write_scale(codes, scale)) return;
    const Vector per_code = broadcast(255.0f / scale);
    for (int64_t p = 0; p < kParts; ++p) {
      const Vector least = smaller(roots[p] * broadcast(0x1.0p120f), broadcast(1.0f));
      store_codes(codes + p * kWidth, larger(roots[p] * per_code, least));
    }
  }
};

// The last elements, fewer than a block, in copies that are as long as one; their records are whole.
template <typename Gradient>
ZS_INLINE void update_last_block(const zs_step& step, int64_t begin, int64_t count) {
  alignas(64) unsigned char gradient[ZS_CODED_BLOCK * 4] = {}, master[ZS_CODED_BLOCK * 4] = {};
  alignas(64) unsigned char low[ZS_CODED_BLOCK * 2] = {}, weight[ZS_CODED_BLOCK * 4] = {};
  const int64_t master_size = step.source.low ? 2 : 4, weight_size = step.weight_dtype == ZS_FLOAT32 ? 4 : 2;
  const int64_t record = begin / ZS_CODED_BLOCK * kRecord;
  const size_t master_bytes = static_cast<size_t>(count * master_size), low_bytes = static_cast<size_t>(count * 2);
  std::memcpy(gradient, at<Gradient>(step.gradient, begin), static_cast<size_t>(count) * sizeof(Gradient));
  std::memcpy(master, at<unsigned char>(step.source.master, begin * master_size), master_bytes);
  if (step.source.low) std::memcpy(low, at<unsigned char>(step.source.low, begin * 2), low_bytes);
  zs_step copy = step;
  copy.gradient = gradient;
  copy.weight = step.weight ? weight : nullptr;
  for (zs_arrays* arrays : {&copy.source, &copy.target}) {
    arrays->master = master;
    if (arrays->low) arrays->low = low;
    for (void*& state : arrays->states) state = at<unsigned char>(state, record);
  }
  CodedAdam<Gradient>{copy, false, false}.run_block(0);
  std::memcpy(at<unsigned char>(step.target.master, begin * master_size), master, master_bytes);
  if (step.target.low) std::memcpy(at<unsigned char>(step.target.low, begin * 2), low, low_bytes);
  if (!step.weight) return;
  std::memcpy(at<unsigned char>(step.weight, begin * weight_size), weight, static_cast<size_t>(count * weight_size));
}

template <typename Gradient>
void update_moments_with(const zs_step& step, int64_t begin, int64_t end, Stream stream) {
  const int64_t whole = begin + (end - begin) / ZS_CODED_BLOCK * ZS_CODED_BLOCK;
  CodedAdam<Gradient>{step, stream.target, stream.weight}.run(begin, whole);
  if (whole < end) update_last_block<Gradient>(step, whole, end - whole);
}

ZS_INLINE void update_moments(const zs_step& step, int64_t begin, int64_t end, Stream stream) {
  switch (step.gradient_dtype) {
    case ZS_FLOAT32: return update_moments_with<float>(step, begin, end, stream);
    case ZS_BFLOAT16: return update_moments_with<BFloat16>(step, begin, end, stream);
    case ZS_FLOAT16: return update_moments_with<Float16>(step, begin, end, stream);
  }
}
