// Shared by the engine's tests: a tiny model, random requests, and an oracle without an engine.
#pragma once

#include "engine/model/model.h"
#include "engine/serve/engine.h"
#include "engine/tokenizer/tokenizer.h"
#include "tests/std.h"
#include "tests/until.h"

namespace baton::engine::serve {

// What a client has seen of one request.
struct Outcome {
  std::vector<int32_t> tokens;
  std::string text;
  bool finished = false;
  FinishReason reason = FinishReason::kError;
  absl::Status status;
  RequestMetrics metrics;
};

// A tiny model (2 layers, V 272, 512 positions) and its tokenizer, made once per process.
const Model& test_model();
// The same checkpoint in this arithmetic.
const Model& test_model(Arithmetic arithmetic);
// The like with experts: in the second layer, or in both.
const Model& qwen3_moe_test_model();
const Model& mixtral_test_model();
const Tokenizer& test_tokenizer();

// `count` requests with ids 0..: some share prefixes, some sample, some stop early.
std::vector<Request> random_requests(uint64_t seed, size_t count);

// Greedy or sampled text, one token per forward pass, in a cache of its own: no engine involved.
std::vector<int32_t> oracle_tokens(const Request& request, const Model& model = test_model());

// Adds a copy of `request` to the engine; its events go to `outcome`.
absl::Status submit(Engine& engine, const Request& request, Outcome* outcome);

// What until() prints of an engine.
std::string state_of(const Engine& engine);

// Steps until the engine has no work left.
void finish_all(Engine& engine, CallSite from = CallSite::here());

// All requests, at most `in_flight` at a time, until each has ended.
std::map<uint64_t, Outcome> run_all(
    Engine& engine, const std::vector<Request>& requests, size_t in_flight,
    const std::function<void()>& after_step = [] {},
    const std::function<void(size_t number)>& before_each = [](size_t) {},
    CallSite from = CallSite::here());

// Every request alone, in an engine that has all the room it wants.
std::map<uint64_t, Outcome> run_one_at_a_time(const std::vector<Request>& requests,
                                              const Model& model = test_model());

// Same tokens, same text, same reason; the first difference is reported.
void expect_same(const std::map<uint64_t, Outcome>& expected,
                 const std::map<uint64_t, Outcome>& actual);

}  // namespace baton::engine::serve
