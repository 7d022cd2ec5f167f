"""The optimizer's own `state_dict` was saved, by number; the resumed run asks for names."""
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict


def own_state(model, optimizer): return optimizer.state_dict()


def save_and_load(save):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    dcp.save({'optimizer': save(model, optimizer)}, checkpoint_id='checkpoint', no_dist=True)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    state = get_optimizer_state_dict(model, optimizer)  # By name
    dcp.load({'optimizer': state}, checkpoint_id='checkpoint', no_dist=True)
    return state['state']['weight']['step']


def broken():
    save_and_load(own_state)


def mended():
    assert save_and_load(get_optimizer_state_dict) == 1
