// Writes steps, and the arithmetic that the algorithms share.
#include <numeric>

#include "collectives/schedules/writers.h"

namespace baton::collectives::schedules {

void Writer::send(uint32_t peer, Place source, uint32_t parts) {
  if (parts == 0) return;
  program_.steps.push_back(
      {.kind = Step::Kind::kSend, .peer = peer, .parts = parts, .source = source});
}

void Writer::receive(uint32_t peer, Place target, uint32_t parts) {
  if (parts == 0) return;
  program_.steps.push_back(
      {.kind = Step::Kind::kReceive, .peer = peer, .parts = parts, .target = target});
}

void Writer::receive_reduce(uint32_t peer, Place target, Place source, uint32_t parts, bool final) {
  if (parts == 0) return;
  program_.steps.push_back({.kind = Step::Kind::kReceiveReduce,
                            .final = final,
                            .peer = peer,
                            .parts = parts,
                            .source = source,
                            .target = target});
}

void Writer::copy(Place target, Place source, uint32_t parts) {
  if (parts == 0 || target == source) return;
  program_.steps.push_back(
      {.kind = Step::Kind::kCopy, .parts = parts, .source = source, .target = target});
}

void Writer::fold(Place target, uint32_t scratch_part) {
  program_.steps.push_back({.kind = Step::Kind::kFold,
                            .final = true,
                            .parts = 1,
                            .source = scratch(scratch_part),
                            .target = target});
}

void Writer::signal(uint32_t to) {
  program_.steps.push_back({.kind = Step::Kind::kSend, .peer = to, .parts = 0});
}

void Writer::await_signal(uint32_t from) {
  program_.steps.push_back({.kind = Step::Kind::kReceive, .peer = from, .parts = 0});
}

uint32_t power_of_two_up_to(uint32_t n) {
  uint32_t power = 1;
  while (power <= n / 2) power *= 2;
  return power;
}

uint32_t power_of_two_from(uint32_t n) {
  const uint32_t below = power_of_two_up_to(n);
  return below == n ? n : 2 * below;
}

Group ring_group(uint32_t ranks, uint32_t rank, uint32_t channel) {
  // The (channel / 2)-th stride; after the last one they start again.
  uint32_t stride = 1;
  for (uint32_t left = channel / 2; left > 0; --left) {
    do {
      stride = stride >= ranks / 2 ? 1 : stride + 1;
    } while (std::gcd(stride, ranks) != 1);
  }
  if (channel % 2 == 1) stride = (ranks - stride) % ranks;
  Group group{0, ranks, 0, stride, ranks};
  // Our number is rank / stride (mod ranks), by Euclid's algorithm.
  int64_t a = stride, b = ranks, x = 1, y = 0;
  while (a > 1 && b > 0) {
    const int64_t q = a / b;
    a -= q * b;
    x -= q * y;
    std::swap(a, b);
    std::swap(x, y);
  }
  const int64_t inverse = (x % ranks + ranks) % ranks;
  group.me = static_cast<uint32_t>(static_cast<uint64_t>(rank) * inverse % ranks);
  return group;
}

}  // namespace baton::collectives::schedules
