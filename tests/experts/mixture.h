// Random mixtures, and what the engine's own kernels make of them on one rank: the oracle.
#pragma once

#include <cmath>

#include "collectives/experts.h"
#include "engine/kernels/elementwise.h"
#include "tests/reduce/reference.h"
#include "tests/test.h"

namespace baton {

// --- elements ------------------------------------------------------------------------------------

using collectives::reduce::reference::BF16, collectives::reduce::reference::F16;
inline float element(DataType type, const void* row, size_t i) {
  if (type == DataType::kF32) return static_cast<const float*>(row)[i];
  const uint16_t bits = static_cast<const uint16_t*>(row)[i];
  return type == DataType::kBF16 ? BF16{bits}.widen() : F16{bits}.widen();
}
inline void set_element(DataType type, void* row, size_t i, float value) {
  if (type == DataType::kF32) {
    static_cast<float*>(row)[i] = value;
  } else {
    static_cast<uint16_t*>(row)[i] =
        type == DataType::kBF16 ? BF16::round(value).bits : F16::round(value).bits;
  }
}

// What this test's experts say: some element-wise function of the row, which depends on the expert.
inline float said(int expert, float in) {
  return in * (1.0f + static_cast<float>(expert % 7) / 8) + static_cast<float>(expert % 5) / 16;
}

// --- a mixture -----------------------------------------------------------------------------------

// One round of one rank.
struct Tokens {
  int count = 0;
  std::vector<int32_t> chosen;    // [count][top_k]
  std::vector<float> weights;     // likewise
  std::vector<std::byte> rows;    // [count][hidden]
  std::vector<std::byte> wanted;  // of combine
};

class Mixture {
 public:
  Mixture(const ExpertsOptions& options, int ranks) : options_(options), ranks_(ranks) {}

  const ExpertsOptions& options() const { return options_; }
  int ranks() const { return ranks_; }
  size_t row_bytes() const { return static_cast<size_t>(options_.hidden) * size_of(options_.type); }

  // Random tokens of one rank; now and then none, all for one expert, or some without experts.
  Tokens tokens(std::mt19937_64& random) const {
    const auto below = [&](int n) { return static_cast<int>(random() % static_cast<uint64_t>(n)); };
    Tokens out;
    const int mood = below(8);
    out.count = mood == 0 ? 0 : mood == 1 ? options_.max_tokens : below(options_.max_tokens + 1);
    const int favourite = below(options_.experts);
    std::vector<int32_t> all(static_cast<size_t>(options_.experts));
    std::iota(all.begin(), all.end(), 0);
    std::vector<int> left(all.size(), options_.capacity > 0 ? options_.capacity : INT_MAX);
    for (int token = 0; token < out.count; ++token) {
      for (int i = 0; i < options_.top_k; ++i) {
        std::swap(all[i], all[i + below(options_.experts - i)]);
      }
      if (mood == 2) std::iter_swap(all.begin(), std::find(all.begin(), all.end(), favourite));
      for (int i = 0; i < options_.top_k; ++i) {
        const int32_t expert = mood == 3 && below(2) == 0 ? -1 : all[i];
        const bool fits = expert >= 0 && left[static_cast<size_t>(expert)]-- > 0;
        out.chosen.push_back(fits ? expert : -1);
        out.weights.push_back(static_cast<float>(below(2001) - 1000) / 777);
      }
    }
    out.rows.resize(static_cast<size_t>(out.count) * row_bytes());
    for (size_t i = 0; i < out.rows.size() / size_of(options_.type); ++i) {
      set_element(options_.type, out.rows.data(), i, static_cast<float>(below(4001) - 2000) / 499);
    }
    expect(out, {});
    return out;
  }

  // What a token's experts say, without those of the ranks in `without`, as one rank has it that
  // has all experts: engine/model/feed_forward.cc, by the same kernels.
  void expect(Tokens& tokens, const std::vector<int>& without) const {
    const auto hidden = static_cast<size_t>(options_.hidden);
    const auto top_k = static_cast<size_t>(options_.top_k);
    const size_t padded = (hidden + 15) / 16 * 16;  // the kernels take whole vectors
    tokens.wanted.assign(tokens.rows.size(), std::byte{0});
    std::vector<float> sum(padded), says(padded), in(hidden);
    for (size_t token = 0; token < static_cast<size_t>(tokens.count); ++token) {
      std::vector<std::pair<int32_t, float>> experts;
      for (size_t i = token * top_k; i < (token + 1) * top_k; ++i) {
        const int32_t expert = tokens.chosen[i];
        if (expert < 0) continue;
        const int rank = expert / (options_.experts / ranks_);
        if (std::find(without.begin(), without.end(), rank) != without.end()) continue;
        experts.emplace_back(expert, tokens.weights[i]);
      }
      std::sort(experts.begin(), experts.end());
      received_as(tokens.rows.data() + token * row_bytes(), in);
      for (size_t i = 0; i < experts.size(); ++i) {
        std::vector<std::byte> output(row_bytes());
        for (size_t e = 0; e < hidden; ++e) {
          set_element(options_.type, output.data(), e, said(experts[i].first, in[e]));
          says[e] = element(options_.type, output.data(), e);
        }
        if (i == 0) {
          sum = says;
          engine::scale(sum.data(), experts[i].second, static_cast<int>(padded));
        } else {
          engine::add_scaled(says.data(), experts[i].second, sum.data(), static_cast<int>(padded));
        }
      }
      if (experts.empty()) continue;
      for (size_t e = 0; e < hidden; ++e) {
        set_element(options_.type, tokens.wanted.data() + token * row_bytes(), e, sum[e]);
      }
    }
  }

  // Answers what a dispatch has brought, and asks for its own answers, which come to `out`.
  absl::StatusOr<Work> combine(Experts& experts, Work dispatch, const Tokens& tokens,
                               std::vector<std::byte>& out) const {
    const auto rows = experts.received(dispatch);
    if (!rows.ok()) return rows.status();
    answer(*rows);
    out.assign(tokens.wanted.size(), std::byte{0x5a});
    return experts.combine_async(dispatch, tokens.weights, out.data(), out.size());
  }
  // Lets the experts of a rank answer all that has come.
  void answer(const ExpertRows& rows) const {
    const auto hidden = static_cast<size_t>(options_.hidden);
    std::vector<float> in(hidden);
    for (const ExpertGroup& group : rows.groups) {
      for (int slot = group.first; slot < group.first + group.count; ++slot) {
        const std::byte* const row = rows.row(slot);
        if (options_.fp8) {
          std::vector<float> scales((hidden + 127) / 128);
          std::memcpy(scales.data(), row + rows.scales_offset, scales.size() * sizeof(float));
          Experts::dequantise(row, scales.data(), hidden, in.data());
        } else {
          for (size_t e = 0; e < hidden; ++e) in[e] = element(options_.type, row, e);
        }
        for (size_t e = 0; e < hidden; ++e) {
          set_element(options_.type, rows.output(slot), e, said(group.expert, in[e]));
        }
      }
    }
  }

 private:
  // A row as its experts see it.
  void received_as(const std::byte* row, std::vector<float>& out) const {
    for (size_t e = 0; e < out.size(); ++e) out[e] = element(options_.type, row, e);
    if (!options_.fp8) return;
    for (size_t begin = 0; begin < out.size(); begin += 128) {
      const size_t end = std::min(begin + 128, out.size());
      float most = 0;
      for (size_t e = begin; e < end; ++e) most = std::max(most, std::fabs(out[e]));
      const float scale = most > 0 ? most / 448 : 1;
      using collectives::reduce::reference::E4M3;
      for (size_t e = begin; e < end; ++e) {
        out[e] = E4M3::round(out[e] * (1 / scale)).widen() * scale;
      }
    }
  }

  const ExpertsOptions options_;
  const int ranks_;
};

inline std::unique_ptr<Experts> experts_of(Communicator& comm, const ExpertsOptions& options) {
  auto experts = Experts::create(comm, options);
  EXPECT_TRUE(experts.ok()) << "rank " << comm.rank() << ": " << experts.status();
  return experts.ok() ? *std::move(experts) : nullptr;
}

// Options of all kinds, small.
inline ExpertsOptions random_options(std::mt19937_64& random, int ranks) {
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<uint64_t>(n)); };
  ExpertsOptions options;
  options.experts = ranks * (1 + below(8));
  options.top_k = 1 + below(std::min(8, options.experts));
  options.hidden = 1 + below(40) + (below(4) == 0 ? below(300) : 0);
  options.max_tokens = 1 + below(12);
  constexpr DataType kTypes[] = {DataType::kF32, DataType::kBF16, DataType::kF16};
  options.type = kTypes[below(3)];
  options.fp8 = below(4) == 0;
  options.capacity = below(3) == 0 ? 1 + below(options.max_tokens) : 0;
  options.in_flight = 1 + below(3);
  options.mode = static_cast<ExpertsMode>(below(3));
  return options;
}

inline testing::AssertionResult same_bits(const std::vector<std::byte>& a,
                                          const std::vector<std::byte>& b) {
  if (a == b) return testing::AssertionSuccess();
  if (a.size() != b.size())
    return testing::AssertionFailure() << a.size() << " bytes, " << b.size();
  const auto at = std::mismatch(a.begin(), a.end(), b.begin()).first - a.begin();
  return testing::AssertionFailure()
         << "they differ from byte " << at << " of " << a.size() << " on";
}

}  // namespace baton
