// The tiny model, random requests and the oracle.
#include "tests/engine_serve/engine_fixture.h"

#include "tests/engine_model/test_model.h"
#include "tests/test.h"

namespace baton::engine::serve {

const Model& test_model() { return test_model(Arithmetic::kFp32); }

const Model& test_model(Arithmetic arithmetic) {
  static auto* models = new std::map<Arithmetic, Model>();
  auto it = models->find(arithmetic);
  if (it == models->end()) {
    const Checkpoint checkpoint = make_test_checkpoint(tiny_model_config(), 1);
    it = models->emplace(arithmetic, *Model::create(checkpoint, arithmetic)).first;
  }
  return it->second;
}

const Model& qwen3_moe_test_model() {
  static const Model* model =
      new Model(*Model::create(make_test_checkpoint(tiny_qwen3_moe_config(), 1)));
  return *model;
}

const Model& mixtral_test_model() {
  static const Model* model =
      new Model(*Model::create(make_test_checkpoint(tiny_mixtral_config(), 1)));
  return *model;
}

const Tokenizer& test_tokenizer() {
  static const Tokenizer* tokenizer = new Tokenizer(make_test_tokenizer());
  return *tokenizer;
}

std::vector<Request> random_requests(uint64_t seed, size_t count) {
  std::mt19937_64 random(seed);
  const auto pick = [&](int low, int high) {  // inclusive
    return low + static_cast<int>(random() % static_cast<uint64_t>(high - low + 1));
  };
  const auto text = [&](int tokens) {
    std::vector<int32_t> ids(static_cast<size_t>(tokens));
    for (int32_t& id : ids) id = pick(0, 255);
    return ids;
  };
  std::vector<std::vector<int32_t>> prefixes;
  for (int i = 0; i < 4; ++i) prefixes.push_back(text(pick(16, 100)));

  std::vector<Request> requests(count);
  for (size_t i = 0; i < count; ++i) {
    Request& request = requests[i];
    request.id = i;
    if (pick(0, 1) == 0) {
      request.tokens = prefixes[static_cast<size_t>(pick(0, 3))];
      request.tokens.resize(static_cast<size_t>(pick(1, static_cast<int>(request.tokens.size()))));
    }
    const std::vector<int32_t> rest = text(pick(request.tokens.empty() ? 1 : 0, 90));
    request.tokens.insert(request.tokens.end(), rest.begin(), rest.end());
    SamplingParams& sampling = request.sampling;
    sampling.max_tokens = pick(1, 40);
    sampling.ignore_eos = pick(0, 3) != 0;
    if (pick(0, 2) != 0) {
      sampling.temperature = 0.1 * pick(1, 15);
      sampling.seed = random();
      if (pick(0, 1) == 0) sampling.top_k = pick(1, 50);
      if (pick(0, 1) == 0) sampling.top_p = 0.05 * pick(1, 20);
    }
    if (pick(0, 4) == 0) sampling.stop = {std::string(1, static_cast<char>(pick('a', 'z')))};
    request.prefill_address = "prefill";
  }
  return requests;
}

std::vector<int32_t> oracle_tokens(const Request& request, const Model& model) {
  ComputePool pool(1);
  Workspace workspace = *model.make_workspace({.max_tokens = 1, .max_chunks = 1}, pool);
  const KvGeometry geometry = model.kv_geometry();
  const size_t capacity = static_cast<size_t>(model.config().max_position_embeddings);
  std::vector<uint32_t> table(geometry.blocks_for(capacity));
  for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<uint32_t>(table.size() - 1 - i);
  const size_t bytes = (geometry.cache_bytes(table.size()) + 4095) / 4096 * 4096;
  const std::unique_ptr<void, void (*)(void*)> memory(std::aligned_alloc(4096, bytes), std::free);
  KvCache cache(geometry, memory.get(), table.size());
  std::vector<float> logits(static_cast<size_t>(model.config().vocab_size));
  LayerHook hook;
  Sampler sampler;

  std::vector<int32_t> tokens = request.tokens;
  for (size_t position = 0; position < capacity; ++position) {
    const SequenceChunk chunk{.tokens = std::span(tokens).subspan(position, 1),
                              .position = static_cast<int32_t>(position),
                              .block_table = table};
    EXPECT_TRUE(model.forward({&chunk, 1}, cache, hook, workspace, logits.data()).ok());
    if (position + 1 < request.tokens.size()) continue;
    tokens.push_back(sampler.choose(logits, request.sampling, tokens.size()).token);
    const size_t made = tokens.size() - request.tokens.size();
    const auto& eos = model.config().eos_token_ids;
    const bool ended = !request.sampling.ignore_eos &&
                       std::find(eos.begin(), eos.end(), tokens.back()) != eos.end();
    if (ended || made == static_cast<size_t>(request.sampling.max_tokens)) break;
  }
  return {tokens.begin() + static_cast<ptrdiff_t>(request.tokens.size()), tokens.end()};
}

absl::Status submit(Engine& engine, const Request& request, Outcome* outcome) {
  Request copy = request;
  copy.on_event = [outcome](const OutputEvent& event) {
    EXPECT_FALSE(outcome->finished) << "an event after the end";
    if (event.has_token) outcome->tokens.push_back(event.choice.token);
    outcome->text += event.text;
    if (!event.finished) return;
    outcome->finished = true;
    outcome->reason = event.reason;
    outcome->status = event.status;
    outcome->metrics = *event.metrics;
  };
  return engine.add_request(std::move(copy));
}

std::string state_of(const Engine& engine) {
  const EngineStats stats = engine.stats();
  return absl::StrCat(stats.running, " requests run, ", stats.waiting, " wait, ", stats.loading,
                      " load, ", stats.free_blocks, " of ", stats.blocks, " blocks are free, ",
                      stats.quarantined_blocks, " quarantined; ");
}

void finish_all(Engine& engine, CallSite from) {
  const auto turn = [&] {
    if (!engine.step()) engine.wait(std::chrono::milliseconds(1), -1);
  };
  until([&] { return !engine.has_work(); }, turn, [&] { return state_of(engine); }, from);
}

std::map<uint64_t, Outcome> run_all(Engine& engine, const std::vector<Request>& requests,
                                    size_t in_flight, const std::function<void()>& after_step,
                                    const std::function<void(size_t)>& before_each, CallSite from) {
  std::map<uint64_t, Outcome> outcomes;
  const auto open = [&] {
    size_t count = 0;
    for (const auto& [id, outcome] : outcomes) count += !outcome.finished;
    return count;
  };
  const auto turn = [&] {
    while (outcomes.size() < requests.size() && open() < in_flight) {
      const Request& request = requests[outcomes.size()];
      before_each(outcomes.size());
      const absl::Status status = submit(engine, request, &outcomes[request.id]);
      EXPECT_TRUE(status.ok()) << status;
    }
    if (!engine.step()) engine.wait(std::chrono::milliseconds(1), -1);
    after_step();
  };
  until([&] { return outcomes.size() == requests.size() && !engine.has_work(); }, turn,
        [&] { return state_of(engine); }, from);
  return outcomes;
}

std::map<uint64_t, Outcome> run_one_at_a_time(const std::vector<Request>& requests,
                                              const Model& model) {
  auto engine = *Engine::create(model, test_tokenizer(), {.blocks = 64});
  std::map<uint64_t, Outcome> outcomes;
  for (const Request& request : requests) {
    Outcome* outcome = &outcomes[request.id];
    const absl::Status status = submit(*engine, request, outcome);
    EXPECT_TRUE(status.ok()) << status;
    finish_all(*engine);
    EXPECT_TRUE(engine->check_integrity().ok()) << engine->check_integrity();
    EXPECT_EQ(engine->stats().free_blocks, 64u);
  }
  return outcomes;
}

void expect_same(const std::map<uint64_t, Outcome>& expected,
                 const std::map<uint64_t, Outcome>& actual) {
  ASSERT_EQ(expected.size(), actual.size());
  for (const auto& [id, want] : expected) {
    const Outcome& got = actual.at(id);
    ASSERT_TRUE(got.finished) << "request " << id;
    ASSERT_EQ(want.tokens, got.tokens) << "request " << id << ": " << got.status;
    ASSERT_EQ(want.text, got.text) << "request " << id;
    ASSERT_EQ(want.reason, got.reason) << "request " << id;
  }
}

}  // namespace baton::engine::serve
