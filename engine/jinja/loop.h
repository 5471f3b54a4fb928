// What loops know of themselves, and what goes round.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "engine/jinja/value.h"

namespace baton::engine::jinja {

// `loop` in a for: it looks ahead only where a template asks for what comes.
class Loop : public Object {
 public:
  Loop(Value source, std::function<Value(const Value&)> recurse, int64_t depth)
      : source_(std::move(source)),
        next_(source_.iterate()),
        recurse_(std::move(recurse)),
        depth_(depth) {}

  bool advance(Value& out);
  void forget();  // at the end: what it holds might hold it

  std::string type() const override { return "loop"; }
  std::string repr() const override;
  std::optional<Value> attribute(const std::string& name) override;
  std::optional<int64_t> length() override;
  Next iterate() override;
  bool callable() const override { return true; }
  Value call(const Args& args) override;

 private:
  const std::optional<Value>& peek();

  Value source_;
  Next next_;
  std::function<Value(const Value&)> recurse_;
  int64_t depth_, index0_ = -1;
  std::optional<int64_t> length_;
  bool peeked_ = false;
  std::optional<Value> after_;  // where it was peeked at; nothing at the end
  Value before_, current_;
  std::optional<Value> changed_;
};

class Cycler : public Object {
 public:
  explicit Cycler(const Args& args);
  std::string type() const override { return "Cycler object"; }
  std::optional<Value> attribute(const std::string& name) override;

 private:
  Values items_;
  size_t at_ = 0;
};

}  // namespace baton::engine::jinja
