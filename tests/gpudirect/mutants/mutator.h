// A table of the driver's calls with one mistake in it: the n-th call of one entry is left out,
// made twice, late, too small, on another stream, without a context, or its "not yet" is taken for
// a yes. Everything else goes on to the table below.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gpudirect/driver.h"

namespace baton::gpudirect {

enum class Mistake : uint8_t {
  kLeftOut,         // and taken to have worked
  kTwice,           //
  kLate,            // after the next call
  kTooSmall,        // half of its bytes
  kOtherFlags,      // that nobody knows
  kOnLegacyStream,  //
  kOtherStream,     // one of those that there are
  kWithoutContext,  //
  kHastily,         // "not ready" is taken for an answer
};
inline constexpr int kMistakes = 9;
const char* name_of(Mistake mistake);

struct Mutant {
  std::string call;
  Mistake mistake = Mistake::kLeftOut;
  int occurrence = 1;  // which of the calls where it can be made

  std::string text() const;
};

// How often each mistake could be made, of each entry, while it was in use.
struct Chance {
  std::string call;
  Mistake mistake;
  int times = 0;
};

// One at a time.
class Mutator {
 public:
  // `below` outlives it. No mutant: only looks for chances.
  explicit Mutator(const Driver& below, Mutant mutant = {});
  ~Mutator();
  Mutator(const Mutator&) = delete;
  Mutator& operator=(const Mutator&) = delete;

  const Driver& table() const { return table_; }
  bool made() const { return made_; }  // the mistake
  std::vector<Chance> chances() const;

 private:
  template <auto Entry>
  friend struct Mutated;

  const Driver& below_;
  const Mutant mutant_;
  Driver table_;
  bool made_ = false;
};

}  // namespace baton::gpudirect
