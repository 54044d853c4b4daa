// Models with several residual streams of a token: AltUp, and hyper-connections. Reference: ../../../models/streams.py.
#pragma once
#include "step.h"

namespace looped {

// -- AltUp (reference: AltUpLayer and AltUpStreams)

inline float* stream_of(Work& w, int64_t b, int64_t i) {
    const int64_t others = w.model.streams - 1;
    return i ? w.engine.streams + (b * others + i - 1) * w.model.hidden : w.engine.first_stream + b * w.model.hidden;
}

// shares [count] += coefficients [count, S] times tanh(router x): x has its norm there.
inline void add_shares(Work& w, const LayerParts& own, const float* x, const float* coefficients, int64_t count, float* shares) {
    const int64_t size = w.model.hidden;
    const float factor = norm_factor(x, size, w.model.eps);
    for (int64_t s = 0; s < w.model.streams; ++s) {
        const float seen = std::tanh(factor * dot(x, own.stream_router + s * size, size));
        for (int64_t i = 0; i < count; ++i) shares[i] += coefficients[i * w.model.streams + s] * seen;
    }
}

// Before attention: all streams are predicted from all, and the layer goes on with the first.
inline void predict_streams(Work& w, int64_t layer, int64_t b) {
    const int64_t count = w.model.streams;
    const LayerParts& own = w.model.parts[layer];
    float shares[MOST_STREAMS * MOST_STREAMS] = {};
    add_shares(w, own, stream_of(w, b, 0), own.stream_prediction, count * count, shares);
    for (int64_t i = 0; i < w.model.hidden; i += W) {
        const int64_t some = std::min<int64_t>(W, w.model.hidden - i);
        vec x[MOST_STREAMS];
        for (int64_t s = 0; s < count; ++s) x[s] = load_some(stream_of(w, b, s) + i, some);
        for (int64_t s = 0; s < count; ++s) {
            vec sum = x[s];
            for (int64_t from = 0; from < count; ++from) sum += shares[s * count + from] * x[from];
            std::memcpy(stream_of(w, b, s) + i, &sum, some * 4);
            if (!s) std::memcpy(w.engine.residual + b * w.model.hidden + i, &sum, some * 4);
        }
    }
}

// Before the MLP: what attention added and the low-rank branch.
inline void join_branches(Work& w, int64_t layer, int64_t b) {
    const int64_t size = w.model.hidden, first = b * size;
    float* x = w.engine.residual + first;
    const LayerParts& own = w.model.parts[layer];
    const float factor = w.engine.factors[b];
    for (int64_t i = 0; i < size; ++i) x[i] += x[i] * factor * own.input_norm[i];
    add_norm(w, w.engine.outputs + first, own.attention_out_norm, x);
    add_norm(w, w.engine.beside + first, own.laurel_norm, x);
    for (int64_t i = 0; i < size; ++i) x[i] *= 0.70710678f;
}

// Behind the MLP: all streams are corrected by how the first differs from its prediction.
inline void correct_streams(Work& w, int64_t layer, int64_t b) {
    const int64_t size = w.model.hidden;
    const LayerParts& own = w.model.parts[layer];
    float *x = w.engine.residual + b * size, *predicted = stream_of(w, b, 0), shares[MOST_STREAMS];
    std::fill(shares, shares + MOST_STREAMS, 1.0f);
    add_norm(w, w.engine.outputs + b * size, own.mlp_out_norm, x);
    add_shares(w, own, x, own.stream_correction, w.model.streams, shares);
    for (int64_t i = 0; i < size; ++i) x[i] -= predicted[i];
    for (int64_t s = 0; s < w.model.streams; ++s)
        for (int64_t i = 0; i < size; ++i) stream_of(w, b, s)[i] += shares[s] * x[i];
    for (int64_t i = 0; i < size; ++i) x[i] = predicted[i] * own.stream_scale[i];
}

// Makes the root mean square of x that of `like`.
inline void resize(Work& w, float* x, const float* like) {
    const int64_t size = w.model.hidden;
    const float factor = std::min(norm_factor(x, size, 0.0f), 316.22777f) / norm_factor(like, size, 0.0f);
    for (int64_t i = 0; i < size; ++i) x[i] *= factor;
}

template <class From>  // from(b): x [D] of a token, multiplied to out [B, rows]
void project_rows(Work& w, const Stack& matrix, From from, float* out) {
    w.end_part();
    make_input(w, matrix, [&](int64_t b, int64_t first, int64_t count, float* made) {
        std::copy(from(b) + first, from(b) + first + count, made);
    });
    w.end_part();
    project(w, matrix, nullptr, out);
}

inline void split_streams(Work& w) {
    const int64_t size = w.model.hidden;
    const auto embedded = [&](int64_t b) { return w.engine.residual + b * size; };
    project_rows(w, w.model.streams_in, embedded, w.engine.streams);
    w.end_part();
    w.share(w.step.batch, 1, [&](int64_t b) {
        std::copy(embedded(b), embedded(b) + size, stream_of(w, b, 0));
        for (int64_t s = 1; s < w.model.streams; ++s) resize(w, stream_of(w, b, s), embedded(b));
    });
}

// Behind the last layer: the mean of all streams, each projected.
inline void merge_streams(Work& w) {
    const int64_t size = w.model.hidden;
    w.share(w.step.batch, 1, [&](int64_t b) {
        std::copy(stream_of(w, b, 0), stream_of(w, b, 0) + size, w.engine.residual + b * size);
    });
    for (int64_t s = 1; s < w.model.streams; ++s) {
        project_rows(w, w.model.streams_out[s - 1], [&](int64_t b) { return stream_of(w, b, s); }, w.engine.beside);
        w.end_part();
        w.share(w.step.batch, 1, [&](int64_t b) {
            float* x = w.engine.beside + b * size;
            resize(w, x, stream_of(w, b, 0));
            for (int64_t i = 0; i < size; ++i) w.engine.residual[b * size + i] += x[i];
        });
    }
    w.end_part();
    norm_settled(w, w.model.final_norm, w.model.head, [&](int64_t b) {
        for (int64_t i = 0; i < size; ++i) w.engine.residual[b * size + i] /= w.model.streams;
    });
}

// -- hyper-connections (reference: HyperLayer)

inline float* streams_of(Work& w, int64_t b) {  // [S, D] of a token
    return w.engine.streams + b * w.model.hyper.streams * w.model.hidden;
}

// What the part before gave, added to the streams by the shares that it was read with.
inline void join_streams(Work& w, Turn turn, int64_t b) {
    const Hyper& hyper = w.model.hyper;
    const int64_t count = hyper.streams, size = w.model.hidden;
    float *streams = streams_of(w, b), *output = w.engine.outputs + b * size;
    if (!w.ranks.is_alone()) sum_parts(w, turn, b, nullptr, output);
    const float *added = w.engine.shares + b * count * (1 + count), *mixed = added + count;
    for_columns(size, [&](int64_t at, int64_t some) {
        const vec out = load_some(output + at, some);
        vec from[MOST_STREAMS];
        for (int64_t s = 0; s < count; ++s) from[s] = load_some(streams + s * size + at, some);
        for (int64_t s = 0; s < count; ++s) {
            vec sum = hyper.iterations ? vec{} : from[s];
            for (int64_t i = 0; hyper.iterations && i < count; ++i) sum += mixed[i * count + s] * from[i];
            store_some(streams + s * size + at, sum + added[s] * out, some);
        }
    });
}

// Streams before layer 0: the embedding, each.
inline void begin_streams(Work& w, int64_t b) {
    const int64_t size = w.model.hidden;
    float *streams = streams_of(w, b), *embedded = w.engine.residual + b * size;
    if (!w.ranks.is_alone()) sum_parts(w, AFTER_MLP, b, nullptr, embedded);
    for (int64_t s = 0; s < w.model.hyper.streams; ++s) std::copy(embedded, embedded + size, streams + s * size);
}

// mixed [S, S] to a matrix whose rows and columns add up to about 1.
inline void balance(const Hyper& hyper, float* mixed) {
    const int64_t count = hyper.streams;
    const auto divide = [&](int64_t line, int64_t next) {  // numbers that follow each other, by their sum
        for (int64_t i = 0; i < count; ++i) {
            float sum = hyper.eps;
            for (int64_t j = 0; j < count; ++j) sum += mixed[i * line + j * next];
            for (int64_t j = 0; j < count; ++j) mixed[i * line + j * next] /= sum;
        }
    };
    for (int64_t i = 0; i < count; ++i) {
        float *row = mixed + i * count, most = *std::max_element(row, row + count), sum = 0.0f;
        for (int64_t j = 0; j < count; ++j) sum += row[j] = std::exp(row[j] - most);
        for (int64_t j = 0; j < count; ++j) row[j] = row[j] / sum + hyper.eps;
    }
    divide(1, count);
    for (int64_t i = 1; i < hyper.iterations; ++i) divide(count, 1), divide(1, count);
}

// From what a token's shares are made of: its sum of the streams, to the residual stream, and how they take what is made
// of that.
inline void decide_shares(Work& w, const Connection& own, int64_t b, int64_t rows) {
    const Hyper& hyper = w.model.hyper;
    const int64_t count = hyper.streams, size = w.model.hidden;
    const float *seen = w.engine.seen + b * hyper.shares, *streams = streams_of(w, b);
    float read[MOST_STREAMS], *added = w.engine.shares + b * count * (1 + count), *mixed = added + count;
    const auto logit = [&](int64_t row) {
        return seen[row] * own.scale[std::min<int64_t>(row / count, 2)] + own.base[row];
    };
    const auto sigmoid = [](float x) { return 1.0f / (1.0f + std::exp(-x)); };
    for (int64_t s = 0; s < count; ++s) read[s] = rows ? sigmoid(logit(s)) + hyper.eps : 1.0f / count;
    for (int64_t s = 0; s < count && rows > count; ++s)
        added[s] = hyper.most_added * sigmoid(logit(count + s)) + (hyper.iterations ? 0.0f : hyper.eps);
    if (rows > 2 * count) {
        for (int64_t i = 0; i < count * count; ++i) mixed[i] = logit(2 * count + i);
        balance(hyper, mixed);
    }
    for_columns(size, [&](int64_t at, int64_t some) {
        vec sum = {};
        for (int64_t s = 0; s < count; ++s) sum += read[s] * load_some(streams + s * size + at, some);
        store_some(w.engine.residual + b * size + at, sum, some);
    });
}

// What a part reads, to the residual stream, behind that `before` it, or the embedding. The connection has `rows`; 0: the
// mean of the streams is read.
inline void read_streams(Work& w, const Connection& own, int64_t rows, Turn before, bool is_first = false) {
    const int64_t wide = w.model.hyper.streams * w.model.hidden;
    w.share(w.step.batch, 1, [&](int64_t b) {
        if (is_first) begin_streams(w, b);
        else join_streams(w, before, b);
        w.engine.factors[b] = norm_factor(streams_of(w, b), wide, w.model.eps);
    });
    w.end_part();
    w.share(rows, 1, [&](int64_t row) {
        for (int64_t b = 0; b < w.step.batch; ++b)
            w.engine.seen[b * w.model.hyper.shares + row] =
                w.engine.factors[b] * dot(streams_of(w, b), own.weights + row * wide, wide);
    });
    w.end_part();
    w.share(w.step.batch, 1, [&](int64_t b) { decide_shares(w, own, b, rows); });
    w.end_part();
}

}  // namespace looped
