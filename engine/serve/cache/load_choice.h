// Whether the KV of a prompt is quicker loaded than computed: all that either costs, as measured.
//
// A step costs a + n (b + c p) for n tokens around position p (the last part is attention); since a
// prompt that is loaded needs a step for its last token too, a is no reason to load. A load costs
// d + e n for n blocks, for each place that they come from, and asking another process what it has
// f + g n. What has not been measured a few times is tried. Of what is refused every
// 64th is done all the same, for it may have become quicker.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "engine/serve/cache/cost_fit.h"
#include "transport/clock.h"

namespace baton::engine::serve {

// Where the blocks of a load come from: the slowest of their places.
enum class LoadPlace : uint8_t { kHost, kDisk, kPeer };

// When blocks that are in a place are loaded.
enum class LoadWhen : uint8_t { kQuicker, kAlways, kNever };

// Not thread-safe.
class LoadChoice {
 public:
  // A step computed tokens [first, first + tokens) of one prompt, and nothing else.
  void computed(size_t first, size_t tokens, Time took);
  // A load brought blocks: how long the prompt had to wait for them.
  void loaded(size_t blocks, LoadPlace place, Time took);
  // Others were asked which of so many blocks they have: how long the prompt waited for the answer.
  void asked(size_t blocks, Time took);

  // To bring `blocks` blocks that hold tokens [first, first + tokens): load them?
  bool load_is_quicker(size_t first, size_t tokens, size_t blocks, LoadPlace place);

  // What a prompt needs.
  struct Wanted {
    size_t first = 0;   // token that is not in the cache
    size_t blocks = 0;  // from there
    size_t near = 0;    // of them that are known to be here without asking
    LoadPlace near_place = LoadPlace::kHost;
  };
  // To ask others for it, who may have all of it in `place`? Not where asking and loading would
  // take longer than doing without them, however much they have.
  bool is_worth_asking(const Wanted& wanted, LoadPlace place);

  // What it reckons with, in seconds; 0 where nothing is known.
  double compute_seconds(size_t first, size_t tokens) const;
  double load_seconds(size_t blocks, LoadPlace place) const;
  double ask_seconds(size_t blocks) const;

 private:
  static constexpr uint32_t kTryAgain = 64;  // refusals
  static constexpr size_t kFewest = 3;       // measured, to know

  const CostFit<2>& load(LoadPlace place) const { return loads_[static_cast<size_t>(place)]; }
  static bool refuse(uint32_t* refused);

  CostFit<3> compute_;  // of a step: its tokens, these times their positions, and itself
  bool prompt_was_last_ = false;
  std::array<CostFit<2>, 3> loads_;  // by place
  CostFit<2> ask_;
  std::array<uint32_t, 3> loads_refused_{};  // by place
  uint32_t questions_refused_ = 0;
};

}  // namespace baton::engine::serve
