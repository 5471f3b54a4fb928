// Forward and backward of the transformer over a batch of equal sequences, in fp32.
//
// Deterministic: every sum has a fixed order, whatever the number of threads.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "engine/kernels/compute_pool.h"
#include "engine/train/backward/parameters.h"

namespace baton::engine::train {

// Called as soon as gradients [begin, end) of the flat array are final; in ascending order.
using GradientsReady = std::function<void(size_t begin, size_t end)>;
// Called before parameters [begin, end) of the flat array are first read, so that they may still be
// on their way when a pass begins: the embedding, each layer from the first to the last, the head.
using ParametersNeeded = std::function<void(size_t begin, size_t end)>;

class Backprop {
 public:
  // Scratch for up to max_tokens tokens (sequences * length) of sequences up to max_length long.
  Backprop(const ParameterMap& map, int max_tokens, int max_length, ComputePool& pool);
  ~Backprop();

  // `tokens` holds `sequences` rows of length + 1 tokens: the last of each row is only a target.
  // `length` is a multiple of 16.
  // Returns the mean loss in nats per token. Writes (does not add) its gradient, the mean over
  // tokens, to `gradients` [map.size].
  float loss_and_gradients(const float* parameters, std::span<const int32_t> tokens, int sequences,
                           int length, float* gradients, const GradientsReady& ready = nullptr,
                           const ParametersNeeded& needed = nullptr);
  // The mean loss alone.
  float loss(const float* parameters, std::span<const int32_t> tokens, int sequences, int length);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace baton::engine::train
